"""Training on rows of data: conversations, preferences and scores."""

from skyrl_megatron.plugins import RANK_ENGINES, RULES, register_option

register_option(
    "--show-row",
    "skyrl_megatron_supervised.show_row:run",
    value="N",
    help="print row N of data.train_data as it is rendered; sft, dpo and reward mark what is trained; --json",
)
RULES.register_path("skyrl_megatron_supervised.rules:supervised_problems")
RANK_ENGINES.register_path("preferences", "skyrl_megatron_supervised.preference_engine:PreferenceEngine")
RANK_ENGINES.register_path("reward", "skyrl_megatron_supervised.preference_engine:RewardEngine")
