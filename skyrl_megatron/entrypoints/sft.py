"""Supervised training: ``skyrl-megatron sft [--config FILE.yaml] [--check [--show-config]] key=value …``

Trains the model of ``trainer.policy.model.path`` on the answers of conversations: rows with a column ``messages``, and
optionally ``tools``, in ``data.train_data``. The loss on ``data.val_data`` is the evaluation. Layouts, optimizer,
adapters, checkpoints and exports are set as in every run (CONFIG.md). Guide: docs/guides/sft.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.schema.sft import SFTTrainConfig
from skyrl_megatron.entrypoints.command import QuickCheck, quick_check, run_command
from skyrl_megatron.preflight import check, load_config
from skyrl_megatron.workers.runtime_env import start_server

if TYPE_CHECKING:
    from skyrl_megatron.entrypoints.experiment import BasePPOExp


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        from skyrl_megatron.config.document import own_keys

        print("\n".join([__doc__ or "", "Keys of this command:", *own_keys(SFTTrainConfig)]))
        return 0
    if any(arg.partition("=")[0] == "--check" for arg in args):
        return check.run(args, cls=SFTTrainConfig)
    return run_command(lambda: _train(args), beats=True)


def _train(args: Sequence[str]) -> int:
    began = time.perf_counter()
    ahead = quick_check(SFTTrainConfig, args)
    if ahead is QuickCheck.FINISHED:
        return 0
    if ahead is QuickCheck.RUN:
        start_server()
    cfg, _ = load_config(SFTTrainConfig, args)
    from skyrl_megatron.entrypoints.experiment import run_experiment  # loads Ray

    run_experiment(cfg, _experiment(), began=began)
    return 0


def _experiment() -> type[BasePPOExp]:
    """Return the experiment: rows instead of prompts, and no engines."""
    from skyrl_megatron import hub
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.rollout.chat_rows import ChatRows
    from skyrl_megatron.rollout.templates import ChatFormat, load_template
    from skyrl_megatron.trainer.sft import SFTTrainer

    class SFTExp(BasePPOExp):
        def _dataset(self, key: str, sources: Sequence[str]) -> Any:
            self._pin(hub.data_sets(key, sources))
            generator, trainer = self.cfg.generator, self.cfg.trainer
            chat = ChatFormat(self.tokenizer, load_template(generator.chat_template), generator.chat_template_kwargs)
            commits, say = trainer.hub_commits, self.start_up.say
            return ChatRows(sources, chat, self.cfg.sft, hub_commits=commits, say=say)  # type: ignore[attr-defined]

        def get_inference_client(self) -> Any:
            return None

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            return None

        def get_trainer(self, *args: Any, **kwargs: Any) -> SFTTrainer:
            return SFTTrainer(*args, **kwargs)

    return SFTExp


if __name__ == "__main__":
    sys.exit(main())
