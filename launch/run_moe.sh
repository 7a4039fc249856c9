#!/usr/bin/env bash
# Set up the environment if needed, then run one step of everything on the embedded Qwen3-MoE: prompts → vLLM → reward →
# GRPO step in Megatron → weights back to vLLM.   launch/run_moe.sh [--seed N] [--dir DIR]   |   --check key=value …
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for argument in "$@"; do
  if [ "$argument" = --check ]; then exec .venv/bin/python -m skyrl_megatron.entrypoints.main_base "$@"; fi
done
exec .venv/bin/python -W ignore -m skyrl_megatron.entrypoints.one_step "$@"
