"""Parts that a rank has only if a setting asks for them."""

from skyrl_megatron.plugins import OPTIMIZERS, PARTS, RULES

PARTS.register_path("skyrl_megatron_parts.draft:DraftTraining")
PARTS.register_path("skyrl_megatron_parts.experts.balance:ExpertBalance")
PARTS.register_path("skyrl_megatron_parts.experts.moves:ExpertMoves")
PARTS.register_path("skyrl_megatron_parts.indexer:IndexerLoss")
PARTS.register_path("skyrl_megatron_parts.qk_clip:QkClip")
PARTS.register_path("skyrl_megatron_parts.profiling:Profiler")
PARTS.register_path("skyrl_megatron_parts.profiling:MemorySnapshots")
OPTIMIZERS.register_path("muon", "skyrl_megatron_parts.muon:MuonInAdam")
RULES.register_path("skyrl_megatron_parts.muon_settings:muon_rule")
