"""Supervised training: ``skyrl-megatron sft [--config FILE.yaml] [--check [--show-config]] key=value …``

Trains the model of ``trainer.policy.model.path`` on the answers of conversations: rows with a column ``messages``, and
optionally ``tools``, in ``data.train_data``. The loss on ``data.val_data`` is the evaluation. Layouts, optimizer,
adapters, checkpoints and exports are set as in every run (CONFIG.md). ``--strict-rows``: a column or key that nothing
reads is an error (``sft.strict_rows=true``). Guide: docs/guides/sft.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.checks import QuickCheck, load_config, quick_check
from skyrl_megatron.command import run_command, with_strict_rows
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, own_keys
from skyrl_megatron.config.schema.sft import SFTTrainConfig
from skyrl_megatron.entrypoints import check
from skyrl_megatron.workers.runtime_env import start_server
from skyrl_megatron_supervised import show_row

if TYPE_CHECKING:
    from skyrl_megatron.entrypoints.experiment import BasePPOExp


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    return run_on_rows(argv, __doc__ or "", SFTTrainConfig, _trainer)


def run_on_rows(
    argv: Sequence[str] | None, about: str, cls: type[SkyRLTrainConfig], trainer: Callable[[], type[Any]]
) -> int:
    """Run a command that trains on rows of data; return its exit code.

    ``cls``: its configuration. ``trainer``: returns the class of its trainer, which loads Ray.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print("\n".join([about, "Keys of this command:", *own_keys(cls)]))
        return 0
    args = with_strict_rows(args, next(name for name in ("sft", "dpo", "reward") if name in cls.__dataclass_fields__))
    if any(arg.partition("=")[0] == "--check" for arg in args):
        return check.run(args, cls=cls)
    if show_row.is_asked(args):
        return show_row.run(args, cls)
    return run_command(lambda: _train(args, cls, trainer), beats=True)


def _train(args: Sequence[str], cls: type[SkyRLTrainConfig], trainer: Callable[[], type[Any]]) -> int:
    began = time.perf_counter()
    ahead = quick_check(cls, args)
    if ahead is QuickCheck.FINISHED:
        return 0
    if ahead is QuickCheck.RUN:
        start_server()
    cfg, _ = load_config(cls, args)
    from skyrl_megatron.entrypoints.experiment import run_experiment  # loads Ray

    run_experiment(cfg, _experiment(trainer()), began=began)
    return 0


def _trainer() -> type[Any]:
    from skyrl_megatron_supervised.sft_trainer import SFTTrainer

    return SFTTrainer


def _experiment(trainer: type[Any]) -> type[BasePPOExp]:
    """Return the experiment: rows instead of prompts, and no engines."""
    from skyrl_megatron import hub
    from skyrl_megatron.config.derive import preferences, supervised
    from skyrl_megatron.data.row_cache import run_cache
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.rollout.templates import ChatFormat, load_template
    from skyrl_megatron_supervised.preference_rows import rows_class
    from skyrl_megatron_supervised.reference_cache import open_caches
    from skyrl_megatron_supervised.row_tokens import cached_rows

    class RowsExp(BasePPOExp):
        def _dataset(self, key: str, sources: Sequence[str]) -> Any:
            self._pin(hub.data_sets(key, sources))
            generator, settings = self.cfg.generator, supervised(self.cfg)
            assert settings is not None
            chat = ChatFormat(self.tokenizer, load_template(generator.chat_template), generator.chat_template_kwargs)
            commits, say = self.cfg.trainer.hub_commits, self.start_up.say
            declared = [column] if (column := self.cfg.data.sampler_options.get("column")) else []
            cache = run_cache(self.cfg.data.row_cache_gb)
            return cached_rows(
                rows_class(settings),
                sources,
                chat,
                settings,
                hub_commits=commits,
                say=say,
                declared=declared,
                cache=cache,
            )

        def get_inference_client(self) -> Any:
            return None

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            return None

        def start_engines(self) -> Any:
            if (pairs := preferences(self.cfg)) is not None and pairs.reference_cache:
                data = {"train": self.train_dataset, "eval": self.eval_dataset}
                self.cfg, self.caches = open_caches(self.cfg, data, self.start_up.say)
            return super().start_engines()

        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            made = trainer(*args, **kwargs)
            if caches := getattr(self, "caches", None):
                made.caches = caches
            return made

    return RowsExp


if __name__ == "__main__":
    sys.exit(main())
