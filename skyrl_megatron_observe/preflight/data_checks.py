"""Check data sets, tokenizers, chat templates and environments. They are opened in the same way as by the run."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.errors import BridgeError
from bridges.files import read_json, text_config
from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config.derive import is_data_file, supervised
from skyrl_megatron.config.hf_model import cached_folder
from skyrl_megatron.config.roles import active_roles, role_layout
from skyrl_megatron.config.rules.evaluation_rules import VAL_DATA, metric_problems, name_problems
from skyrl_megatron.config.schema.evaluation import DATASET_KEY, SETS, UNKNOWN, read_eval_sets
from skyrl_megatron.envs.base_text_env import is_built_in, names_built_in, warn_of_missing_answers
from skyrl_megatron.errors import ConfigError, DataError, ModelLoadError, Problem, SkyRLMegatronWarning

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.data.row_cache import RowCache
    from skyrl_megatron.data.row_files import Rows
    from skyrl_megatron.rollout.templates import ChatFormat


_QUESTION, _ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
_MODEL, _TEMPLATE = "trainer.policy.model.path", "generator.chat_template.name_or_path"


def chat_format(run: PlannedRun) -> tuple[ChatFormat | None, Sequence[Problem | NotChecked]]:
    """Return the run's chat format, None if it cannot be loaded, and the problems found."""
    from skyrl_megatron.data.vocabulary import (
        configured_stops,
        require_one_start,
        require_vocabulary,
        warn_of_split_markers,
    )
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
            why = "the folder has no tokenizer yet, so chat template and prompt lengths are not checked"
            return None, [*problems, NotChecked(f"{_MODEL}={path}", why)]
        try:
            tokenizer = load_tokenizer(folder, trust_remote_code=trainer.trust_remote_code)
            require_vocabulary(
                tokenizer, folder, tp=role_layout(run.cfg, "policy").tp, stops=configured_stops(generator)
            )
        except ModelLoadError as error:
            problems.append(Problem(_MODEL, path, str(error)))
    if tokenizer is None or problems:
        return None, problems
    try:
        chat = ChatFormat(tokenizer, template, generator.chat_template_kwargs)
        require_one_start(tokenizer, chat.prompt([_QUESTION]))
        if generator.max_turns > 1:
            chat.after_answer([_QUESTION])
            chat.prompt([_QUESTION, _ANSWER, _QUESTION])
    except (DataError, ModelLoadError) as error:
        key, value = (_MODEL, path) if template is None else (_TEMPLATE, generator.chat_template.name_or_path)
        return None, [Problem(key, value, str(error))]
    if template is not None:
        warn_of_split_markers(tokenizer, template)
    _warn_of_unused(template or str(tokenizer.chat_template), generator.chat_template_kwargs, tokenizer)
    _warn_of_stops(chat, configured_stops(generator))
    return chat, []


def _warn_of_stops(chat: ChatFormat, configured: Sequence[int]) -> None:
    """Warn of tokens with which the template ends answers, and at which no engine stops."""
    missing = sorted(chat.stop_ids.difference(chat.stop_token_ids, configured))
    if missing:
        names = ", ".join(f"{chat.tokenizer.convert_ids_to_tokens(token)!r} (id {token})" for token in missing)
        warnings.warn(
            f"the chat template ends answers with {names}, but engines stop at {list(chat.stop_token_ids)} only: add"
            " it to eos_token_id of the model's generation_config.json",
            SkyRLMegatronWarning,
            stacklevel=2,
        )


def _without_key(error: DataError) -> str:
    return str(error).partition(": ")[2] or str(error)


def _warn_of_unused(template: str, arguments: Mapping[str, Any], tokenizer: Any) -> None:
    """Warn of arguments that neither the template nor ``apply_chat_template`` uses."""
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


def vocabularies(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield a problem for each model whose tokenizer differs from the policy's, or that has fewer embeddings. A folder
    without a tokenizer is compared by its number of embeddings only."""
    trainer = run.cfg.trainer
    policy = cached_folder(run.cfg, weights=False)
    if policy is None:
        return
    for role in active_roles(run.cfg):
        path = getattr(trainer, role).model.path
        folder = cached_folder(run.cfg, role, weights=False) if path != trainer.policy.model.path else None
        if folder is not None and (difference := _difference(policy, folder)):
            yield Problem(f"trainer.{role}.model.path", path, f"{difference}: use a model with the policy's tokenizer")


def _difference(policy: Path, other: Path) -> str | None:
    """Return how the vocabularies of two folders differ; None if they agree or cannot be compared."""
    policy_tokens, other_tokens = _tokens(policy), _tokens(other)
    if policy_tokens and other_tokens and policy_tokens != other_tokens:
        token = next(
            token for token in [*policy_tokens, *other_tokens] if policy_tokens.get(token) != other_tokens.get(token)
        )
        named = [tokens.get(token, "no token") for tokens in (policy_tokens, other_tokens)]
        return f"its tokenizer differs from the policy's ({token!r} is {named[1]} here, {named[0]} in the policy)"
    sizes = _embeddings(policy), _embeddings(other)
    if (
        None in sizes
        or sizes[0] == sizes[1]
        or (policy_tokens and other_tokens and max(policy_tokens.values()) < int(sizes[1] or 0))
    ):
        return None
    return f"its vocabulary has {sizes[1]} entries, the policy's has {sizes[0]}"


def _tokens(folder: Path) -> dict[str, int]:
    """Return token → id of ``tokenizer.json``; {} if the file is missing or has another format."""
    try:
        described: dict[str, Any] = read_json(folder / "tokenizer.json")
        vocabulary = described["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] by id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{added["content"]: added["id"] for added in described.get("added_tokens", ())}}
    except (BridgeError, ValueError, KeyError, TypeError):
        return {}


def _embeddings(folder: Path) -> int | None:
    try:
        return int(text_config(read_json(folder / "config.json"))["vocab_size"])
    except (BridgeError, ValueError, KeyError, TypeError):
        return None


_ENV = "environment.env_class"


def data(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield every problem of tokenizer, chat template, data sets and environments."""
    chat, problems = chat_format(run)
    yield from problems
    if (settings := supervised(run.cfg)) is not None:
        with _quiet(run):
            yield from _conversations(run, chat, settings)
        return
    named: set[str | None] = set()
    groups: dict[str, set[str]] = {}
    with _quiet(run):
        for key, names, needed in _sources(run):
            rows, unopened = _open_all(run, key, names)
            yield from unopened
            wrong = [problem for name, dataset in rows.items() for problem in _rows(run, key, name, dataset, named)]
            yield from wrong
            if not names or len(rows) < len(set(names)):
                continue
            if key != "data.train_data":
                groups |= _groups(run, key, rows.values())
            if key == "data.train_data" and not wrong:
                yield from _sampler(run, [rows[name] for name in names])
            if chat is not None and not wrong:
                yield from _lengths(run, key, names, chat, needed)
            elif (count := sum(map(len, rows.values()))) < needed and key == "data.train_data":
                yield _too_few(needed, f"{count} prompts")
    yield from name_problems(run.cfg, groups)
    if run.training and not list(metric_problems(run.cfg, {})):  # else reported without the data
        yield from metric_problems(run.cfg, groups)
    yield from _environments(run, named)


def _groups(run: PlannedRun, key: str, rows: Iterable[Rows]) -> dict[str, set[str]]:
    """Return by whose values of which column the rows of held-out data are scored (``HeldOutGroups``)."""
    name, column = key, DATASET_KEY
    if key != VAL_DATA:
        name = key.split(".")[2]
        column = read_eval_sets(run.cfg.data.eval_sets)[0][name].group_by
    values: set[str] = set()
    for part in rows:
        has_column = column in part.column_names
        values |= {str(row.get(column, UNKNOWN)) for row in part.each([column])} if has_column else {UNKNOWN}
    return {name: values}


def _conversations(run: PlannedRun, chat: ChatFormat | None, settings: SFTConfig) -> Iterator[Problem | NotChecked]:
    """Check every row of supervised training, and tokenize enough of them for a step."""
    from skyrl_megatron_supervised.preference_rows import rows_class
    from skyrl_megatron_supervised.row_tokens import check_rows

    kind, column = rows_class(settings), run.cfg.data.sampler_options.get("column")
    cache, declared = _cache(run), [column] if column else []
    for key, names, needed in _sources(run):
        rows, unopened = _open_all(run, key, names)
        yield from unopened
        if not names or len(rows) < len(set(names)):
            continue
        if key == "data.train_data":
            yield from _sampler(run, [rows[name] for name in names])
        if chat is not None and cache is not None:
            try:
                made = kind.to_make(names, chat, settings, declared=declared, cache=cache)
                count = check_rows(made, cache, needed)
            except DataError as error:
                yield Problem(key, names, str(error))
                return
            except (OSError, RuntimeError):  # there can be no cache: the run says so
                pass
            else:
                if count < needed:
                    yield _too_few(needed, f"{count} rows")
                continue
        for name, dataset in rows.items() if settings.invalid_rows == "error" else ():
            for number, row in enumerate(dataset):
                _, _, problem, details = kind.checked(dataset, number, row, settings)
                if problem and not problem.startswith(kind.LEFT_OUT):
                    fix = f"correct or remove the row, or set {settings.SECTION}.invalid_rows=skip"
                    yield Problem(key, name, f"row {number}: {problem}{details}: {fix}")
                    return
        if chat is None:
            continue
        try:
            count = len(kind(names, chat, settings, enough=needed))
        except DataError as error:
            yield Problem(key, names, str(error))
        else:
            if count < needed:
                yield _too_few(needed, f"{count} rows")
            elif (total := sum(map(len, rows.values()))) > count:
                why = f"the form of all {total} rows was read, {count} were tokenized; the run tokenizes the others"
                yield NotChecked(f"tokens of {key}", why)


def _cache(run: PlannedRun) -> RowCache | None:
    """Return the cache of rows that the run will use; a check alone leaves no files."""
    from skyrl_megatron.data.row_cache import run_cache

    return None if run.check_only else run_cache(run.cfg.data.row_cache_gb)


def _sampler(run: PlannedRun, rows: Sequence[Rows]) -> Iterator[Problem]:
    """Make the sampler with all ``rows`` of the data sets, and yield the problems of its options and of the data."""
    from skyrl_megatron.data.row_files import JoinedRows
    from skyrl_megatron.data.samplers import KEY, SampledRows, make_sampler
    from skyrl_megatron.plugins import SAMPLERS

    settings, trainer = run.cfg.data, run.cfg.trainer
    chosen = settings.is_set("sampler") or settings.is_set("sampler_options")
    if not chosen or list(SAMPLERS.problems(settings.sampler)):  # the name is reported already
        return
    dataset = SampledRows(JoinedRows(rows), run.cfg.data.train_data)
    try:
        sampler = make_sampler(
            settings.sampler, settings.sampler_options, dataset, trainer.train_batch_size, trainer.seed
        )
    except ConfigError as error:
        yield from error.problems
    except DataError as error:
        yield Problem(KEY, settings.sampler, str(error))
    else:
        if len(sampler) < trainer.train_batch_size <= len(dataset):
            yield _too_few(trainer.train_batch_size, f"{len(sampler)} prompts of {KEY}={settings.sampler}")


def _sources(run: PlannedRun) -> Iterator[tuple[str, list[str], int]]:
    """Yield (key, data sets, minimum number of prompts)."""
    cfg = run.cfg
    if run.training:
        yield "data.train_data", cfg.data.train_data, cfg.trainer.train_batch_size
    if run.training and not cfg.trainer.eval_before_train and cfg.trainer.eval_interval <= 0:
        return
    if cfg.data.val_data:
        yield "data.val_data", cfg.data.val_data, 1
    for name, one in read_eval_sets(cfg.data.eval_sets)[0].items():
        yield f"{SETS}.{name}.data", one.data, 1


def _open_all(run: PlannedRun, key: str, names: Sequence[str]) -> tuple[dict[str, Rows], list[Problem | NotChecked]]:
    """Open the data files of a key. Returns name → rows of those that were opened, and the problems."""
    rows: dict[str, Rows] = {}
    problems: list[Problem | NotChecked] = [] if names else [Problem(key, [], "set at least one data set")]
    for name in names:
        opened, found = _open(run, key, name)
        problems += found
        if opened is not None:
            rows[name] = opened
    return rows, problems


def _open(run: PlannedRun, key: str, name: str) -> tuple[Rows | None, list[Problem | NotChecked]]:
    """Open a data file. Returns its rows, None if it was not opened, and the problems."""
    from skyrl_megatron.data.row_files import READERS, load_source

    path = Path(name)
    if path.suffix.lower() not in READERS and not os.path.isfile(path) and not is_data_file(name):
        return None, [NotChecked(f"{key}={name}", "a data set of the hub, which the run opens")]
    if not os.path.isfile(path):
        if os.path.isdir(path):
            return None, [NotChecked(f"{key}={name}", "a folder, which the run opens")]
        if run.scripted and not run.cfg.data.is_set(key.split(".")[1]):
            return None, [
                NotChecked(f"{key}={name}", "the file does not exist; the script may supply other data sets")
            ]
        if run.check_only and run.hardware.elsewhere:
            return None, [NotChecked(f"{key}={name}", "no such file here: rows, lengths and steps are not checked")]
        hint = "; create it with skyrl-megatron prepare gsm8k" if "gsm8k" in name else ""
        return None, [Problem(key, name, f"no such file{hint}")]
    if path.suffix.lower() not in READERS:
        return None, [Problem(key, name, f"unknown file format: use one of {', '.join(READERS)}")]
    try:
        return load_source(name, cache=_cache(run)), []
    except DataError as error:
        return None, [Problem(key, name, _about(name, error))]


def _rows(run: PlannedRun, key: str, name: str, rows: Rows, named: set[str | None]) -> Iterator[Problem | NotChecked]:
    """Check the columns and every row, and add the environments of the rows to ``named``."""
    from skyrl_megatron.config.roles import ADAPTER_KEY
    from skyrl_megatron.config.roles import ADAPTERS_KEY as ADAPTERS
    from skyrl_megatron.data.prompts import (
        REWARD_SPEC,
        TEACHER_KEY,
        TEACHERS,
        require_known,
        require_prompts,
        row_problem,
    )

    adapters = tuple(run.cfg.trainer.policy.model.lora.adapters)
    default = run.cfg.environment.env_class
    ours: dict[str, bool | None] = {}
    without_answers: Counter[str] = Counter()
    try:
        require_prompts(rows, name)
        require_known(rows, name, ADAPTER_KEY, adapters, ADAPTERS, needed=len(adapters) > 1)
        require_known(rows, name, TEACHER_KEY, tuple(run.cfg.trainer.teacher.models), TEACHERS)
        for number, row in enumerate(rows):
            if fault := row_problem(row):
                raise DataError(f"{rows.place(number)}: {fault}")
            env_class = row.get("env_class") or default
            if env_class not in ours:
                ours[env_class] = names_built_in(env_class)
            if ours[env_class] and (problem := _unfit_for_environment(run, key, name, number, row)):
                yield problem
                return
            named.add(row.get("env_class"))
            without_answers[env_class] += not row.get(REWARD_SPEC)
    except DataError as error:
        yield Problem(key, name, _about(name, error))
        return
    warn_of_missing_answers(name, without_answers, len(rows))


def _unfit_for_environment(run: PlannedRun, key: str, name: str, number: int, row: dict[str, Any]) -> Problem | None:
    """Create the built-in environment of a row, and return its error. Custom environments are not created, because
    they may start processes."""
    from skyrl_megatron.envs import base_text_env as registry

    env_class = row.get("env_class") or run.cfg.environment.env_class
    extras = {column: value for column, value in row.items() if column not in ("prompt", "env_class")}
    try:
        settings = registry.config_of(env_class, run.cfg.environment.skyrl_gym)
    except DataError:  # reported once for all rows
        return None
    try:
        registry.make(env_class, settings, {**extras, "max_turns": run.cfg.generator.max_turns}).close()
    except Exception as error:  # as in a rollout, every error of an environment counts as an error of its row
        fix = f"row {number}: environment {env_class}: {error}"
        return Problem(key, name, f"{fix}; add the missing columns to the rows, or choose another {_ENV}")
    return None


def _lengths(run: PlannedRun, key: str, names: Sequence[str], chat: ChatFormat, needed: int) -> Iterator[Problem]:
    """Tokenize prompts until enough of them for a step are short enough."""
    from skyrl_megatron.data.prompts import PromptDataset

    limit = run.cfg.trainer.max_prompt_length
    try:
        dataset = PromptDataset(
            names,
            chat.tokenizer,
            limit,
            template=chat.template,
            template_kwargs=chat.kwargs,
            enough=needed,
            strict=run.cfg.data.strict_rows,
        )
    except DataError as error:
        text = str(error)
        too_long = text.startswith(", ".join(names)) and "max_prompt_length" in text
        yield Problem("trainer.max_prompt_length", limit, text) if too_long else Problem(key, names, text)
        return
    if len(dataset) < needed:
        left_out = f" ({dataset.num_filtered} longer prompts are dropped)" if dataset.num_filtered else ""
        yield _too_few(needed, f"{len(dataset)} prompts{left_out}")


def _too_few(needed: int, prompts: str) -> Problem:
    return Problem("trainer.train_batch_size", needed, f"{prompts} do not fill one batch: lower it, or add more data")


def _environments(run: PlannedRun, named: set[str | None]) -> Iterator[Problem | NotChecked]:
    """Check the environments of the rows, and warn if ``environment.env_class`` applies to no row."""
    from skyrl_megatron.envs import base_text_env as registry

    default = run.cfg.environment.env_class
    chosen = run.cfg.environment.is_set("env_class")
    if not named and not chosen:
        return
    registered = set(registry.registered())
    for env_class in sorted({name or default for name in named} | ({default} if chosen else set())):
        key = _ENV if env_class == default else "data: env_class"
        try:
            registry.require([env_class], run.cfg.environment.skyrl_gym)
        except DataError as error:
            if run.scripted and env_class not in registered:
                yield NotChecked(f"{key}={env_class}", "not registered yet; the script may register it")
                continue
            near = difflib.get_close_matches(env_class, registered, n=1)
            yield Problem(key, env_class, f"{error}" + (f"; did you mean {near[0]!r}?" if near else ""))
        else:
            spec = registry.spec(env_class).load()
            if "://" in env_class:
                yield NotChecked(f"environment {env_class}", "the run asks this server for rewards, and not before")
            if not is_built_in(spec):
                yield NotChecked(
                    f"environment {env_class}", "whether it accepts the rows shows when the run creates it"
                )
    if chosen and default in registered and named and None not in named and default not in named:
        others = ", ".join(sorted(filter(None, named)))
        message = f"{_ENV}={default} has no effect: every row names its own environment ({others})"
        warnings.warn(message, SkyRLMegatronWarning, stacklevel=2)


def _about(name: str, error: DataError) -> str:
    """Return the message without the name of the file, which is the value of the problem."""
    return str(error).removeprefix(name).lstrip(":, ")


@contextmanager
def _quiet(run: PlannedRun) -> Iterator[None]:
    """Silence the log of ``datasets``, and its progress bars if stderr is not a terminal. Without any file to open,
    the library is not loaded."""
    if not any(os.path.exists(name) for _, names, _ in _sources(run) for name in names):
        yield
        return
    import datasets

    verbosity = datasets.logging.get_verbosity()
    hides_progress = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if hides_progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if hides_progress:
            datasets.enable_progress_bars()
