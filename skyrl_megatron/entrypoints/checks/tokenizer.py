"""The tokenizer and the chat template: loaded, and tried on a conversation."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import DataError, ModelLoadError, Problem, SkyRLMegatronWarning
from skyrl_megatron.hub import cached_folder

if TYPE_CHECKING:
    from skyrl_megatron.rollout.templates import ChatFormat

_QUESTION, _ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
_MODEL, _TEMPLATE = "trainer.policy.model.path", "generator.chat_template.name_or_path"


def chat_format(run: PlannedRun) -> tuple[ChatFormat | None, Sequence[Problem | NotChecked]]:
    """Return what turns conversations into tokens, None where it is not to be had, and what was found."""
    from skyrl_megatron.rollout.templates import ChatFormat, load_template

    trainer, generator = run.cfg.trainer, run.cfg.generator
    problems, template, tokenizer = [], None, None
    if generator.chat_template.source == "file" and not generator.chat_template.name_or_path:
        problems.append(Problem(_TEMPLATE, None, "source=file needs the path of a Jinja file"))
    try:
        template = load_template(generator.chat_template)
    except DataError as error:
        problems.append(Problem(_TEMPLATE, generator.chat_template.name_or_path, _without_key(error)))
    path = trainer.policy.model.path
    folder = cached_folder(run.cfg, weights=False) if path else None
    if folder is not None and (folder / "config.json").is_file():
        from skyrl_megatron.data.tokenizer import has_tokenizer, load_tokenizer

        if run.awaits_files(folder) and not has_tokenizer(folder):
            why = "no tokenizer there yet: the chat template, and how many prompts are short enough"
            return None, [*problems, NotChecked(f"{_MODEL}={path}", why)]
        try:
            tokenizer = load_tokenizer(folder, trust_remote_code=trainer.trust_remote_code)
        except ModelLoadError as error:
            problems.append(Problem(_MODEL, path, str(error)))
    if tokenizer is None or problems:
        return None, problems
    try:
        chat = ChatFormat(tokenizer, template, generator.chat_template_kwargs)
        chat.prompt([_QUESTION])
        if generator.max_turns > 1:
            chat.after_answer([_QUESTION])
            chat.prompt([_QUESTION, _ANSWER, _QUESTION])
    except DataError as error:
        key, value = (_MODEL, path) if template is None else (_TEMPLATE, generator.chat_template.name_or_path)
        return None, [Problem(key, value, str(error))]
    _warn_of_unused(template or str(tokenizer.chat_template), generator.chat_template_kwargs, tokenizer)
    return chat, []


def _without_key(error: DataError) -> str:
    return str(error).partition(": ")[2] or str(error)


def _warn_of_unused(template: str, arguments: Mapping[str, Any], tokenizer: Any) -> None:
    """Warn of arguments that neither the template nor ``apply_chat_template`` takes: they change nothing."""
    if not arguments:
        return
    from jinja2 import Environment, meta

    used = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    used |= set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in set(arguments) - used:
        warnings.warn(
            f"generator.chat_template_kwargs.{name}={arguments[name]}: the chat template does not use it",
            SkyRLMegatronWarning,
            stacklevel=2,
        )
