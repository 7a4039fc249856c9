"""Why trainer and engine give a step's samples other log-probs: recorded samples replayed on both sides, the witnesses
compared, and one cause named (``python -m skyrl_megatron.explain_gap``)."""
