"""Training on rows of data: conversations, preferences and scores."""

from skyrl_megatron.plugins import RANK_ENGINES

RANK_ENGINES.register_path("preferences", "skyrl_megatron_supervised.preference_engine:PreferenceEngine")
RANK_ENGINES.register_path("reward", "skyrl_megatron_supervised.preference_engine:RewardEngine")
