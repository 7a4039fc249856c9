"""Commands around a run: doctor, replay, mismatch, clusters, engines on other hosts, the embedded run.

Registers what a run uses of them by path, so that an import of this package loads none of them.
"""

from skyrl_megatron import envs

envs.register("addition", "skyrl_megatron_tools.embedded.arithmetic:AdditionEnv")
envs.register("multiply", "skyrl_megatron_tools.embedded.arithmetic:MultiplyEnv")
