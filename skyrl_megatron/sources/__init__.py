"""Where the groups of a step come from: sampled, oversampled, streamed or replayed."""

from skyrl_megatron.plugins import SOURCES

SOURCES.register_path("sampled", "skyrl_megatron.sources.source:PromptRollouts")
SOURCES.register_path("oversampled", "skyrl_megatron.sources.oversampled:OversampledRollouts")
SOURCES.register_path("streamed", "skyrl_megatron.sources.streamed_source:StreamedRollouts")
