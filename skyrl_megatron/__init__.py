"""RL post-training of large Mixture-of-Experts models on Megatron-Core. ARCHITECTURE.md shows the layers."""

__version__ = "0.1.0"
