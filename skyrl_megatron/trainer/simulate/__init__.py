"""``python -m skyrl_megatron.trainer.simulate``: step times, how busy machines are, how old samples get."""
