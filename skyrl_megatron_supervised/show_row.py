"""``--show-row N``: one row of ``data.train_data`` as the run trains it, from tokenizer, data and settings alone.

    skyrl-megatron sft --show-row 3 trainer.policy.model.path=MODEL data.train_data=[rows.jsonl]

prints the text of each sequence of the row, with the trained tokens in colour on a terminal, else between ⟦ and ⟧; for
``reward``, the token at which an answer is scored. ``--json`` prints one JSON object instead. N counts the rows of all
data sets from 0, as error messages do. No weights are read, and nothing is started.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron import hub
from skyrl_megatron.command import run_command
from skyrl_megatron.config.derive import derive, supervised
from skyrl_megatron.config.hf_model import hub_models, model_folder
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.schema.run import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.trained_answers import TrainedSequence

SHOW_ROW, JSON = "--show-row", "--json"
TRAINED_COLOUR, PLAIN = "\x1b[1;32m", "\x1b[0m"
TRAINED_MARKS = ("⟦", "⟧")

type Sequences = list[tuple[str, list[int], list[int]]]
"""(name of the answer in its row, ids, 1 for each trained id) of each sequence."""
type Decode = Callable[[list[int]], str]


def is_asked(args: Sequence[str]) -> bool:
    """Return whether ``args`` have ``--show-row``."""
    return any(arg.partition("=")[0] == SHOW_ROW for arg in args)


def run(args: Sequence[str], cls: type[SkyRLTrainConfig]) -> int:
    """Print the row, and return the exit code: 0, 1 if it cannot be trained or read, 2 if a setting is wrong."""

    def work() -> int:
        number, as_json, settings = _options(args)
        cfg, problems = parse(cls, settings)
        if problems:
            raise ConfigError(problems)
        derive(cfg)
        location, sequences, decode = _rendered(cfg, number)
        if as_json:
            print(json.dumps({"sequences": [_described(name, ids, mask, decode) for name, ids, mask in sequences]}))
            return 0
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        marks = (TRAINED_COLOUR, PLAIN) if coloured else TRAINED_MARKS
        print(f"{location}: {len(sequences)} sequence{'s' * (len(sequences) != 1)}")
        for name, ids, mask in sequences:
            print(f"--- {name}: {len(ids)} tokens, {sum(mask)} trained")
            print(_marked(ids, mask, decode, marks))
        return 0

    return run_command(work)


def _options(args: Sequence[str]) -> tuple[int, bool, list[str]]:
    """Return (row number, whether JSON is wanted, the other arguments). Raises ConfigError for a wrong number."""
    number, as_json, settings = "", False, list[str]()
    rest = iter(args)
    for arg in rest:
        name, equals, text = arg.partition("=")
        if name == SHOW_ROW:
            number = text if equals else next(rest, "")
        elif arg == JSON:
            as_json = True
        else:
            settings.append(arg)
    if not number.isdecimal():
        raise ConfigError([Problem(SHOW_ROW, number, "write the number of a row, counted from 0: --show-row 3")])
    return int(number), as_json, settings


def _rendered(cfg: SkyRLTrainConfig, number: int) -> tuple[str, Sequences, Decode]:
    """Return file and row, the row's sequences, and the tokenizer's decoder.

    Raises DataError for a row that does not exist, or that cannot be trained.
    """
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.rollout.templates import ChatFormat, load_template

    if not cfg.data.train_data:
        raise ConfigError([Problem("data.train_data", [], f"name the data set whose row {number} is shown")])
    references = [*hub_models(cfg, ["policy"]), *hub.data_sets("data.train_data", cfg.data.train_data)]
    if problems := hub.pin(cfg.trainer.hub_commits, references, {}, _on_stderr):
        raise ConfigError(problems)
    folder = model_folder(cfg, weights=False)
    tokenizer: Any = load_tokenizer(folder, trust_remote_code=cfg.trainer.trust_remote_code)
    generator = cfg.generator
    chat = ChatFormat(tokenizer, load_template(generator.chat_template), generator.chat_template_kwargs)
    location, named = _of_data(cfg, number, chat)
    sequences = [(name, [*prompt, *answer], [*[0] * len(prompt), *mask]) for name, (prompt, answer, mask) in named]
    return location, sequences, lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _of_data(cfg: SkyRLTrainConfig, number: int, chat: ChatFormat) -> tuple[str, list[tuple[str, TrainedSequence]]]:
    """Return file and row, and (name of the answer, (prompt, response, mask)) of each sequence. In a run that samples,
    the sequence is the prompt: nothing of it is trained."""
    from skyrl_megatron.data.message_form import MessageForm, Said
    from skyrl_megatron.data.messages import declared_tools
    from skyrl_megatron.data.prompts import TOOLS, row_problem
    from skyrl_megatron.data.row_files import JoinedRows, load_source
    from skyrl_megatron_supervised.chat_rows import require_row
    from skyrl_megatron_supervised.preference_rows import rows_class

    names, commits, settings = cfg.data.train_data, cfg.trainer.hub_commits, supervised(cfg)
    if settings is not None:
        chosen = rows_class(settings)(names, chat, settings, only=number, hub_commits=commits, say=_on_stderr)
        return chosen.rows.place(number), chosen.named_sequences(0)
    rows = JoinedRows([load_source(name, 1, commits, _on_stderr) for name in names])
    require_row(rows, number)
    row, _ = rows.as_written(number, rows[number], ("prompt", TOOLS))
    if problem := row_problem(row):
        raise DataError(f"{rows.place(number)}: {problem}")
    form = MessageForm(chat.tokenizer, chat.template, chat.kwargs, thinking="ignore")
    said = Said()
    messages = form.fitted(row["prompt"], said)
    if unread := sorted(said.unread):
        note = f"nothing reads the key {unread[0]!r} of messages"
        if cfg.data.strict_rows:
            raise DataError(f"{rows.place(number)}: {note}: remove it, or set data.strict_rows=false")
        _on_stderr(f"data: {note}")
    text = chat.text(messages, generation_prompt=True, tools=declared_tools(row.get(TOOLS)))
    return rows.place(number), [("prompt", (chat.encoder.whole(text), [], []))]


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _described(name: str, ids: list[int], mask: list[int], decode: Decode) -> dict[str, Any]:
    """Return a sequence as JSON: its ids, 1 for each trained one, the text, and that of each run of trained ids."""
    runs = [decode(part) for trained, part in _runs(ids, mask) if trained]
    return {"answer": name, "ids": ids, "trained": mask, "text": decode(ids), "trained_text": runs}


def _marked(ids: list[int], mask: list[int], decode: Decode, marks: tuple[str, str]) -> str:
    before, after = marks
    parts = ((trained, decode(part)) for trained, part in _runs(ids, mask))
    return "".join(f"{before}{text}{after}" if trained else text for trained, text in parts)


def _runs(ids: list[int], mask: list[int]) -> Iterator[tuple[bool, list[int]]]:
    """Yield (whether they are trained, ids) of each run of ids that are trained, or are not."""
    for trained, pairs in itertools.groupby(zip(mask, ids, strict=True), key=lambda pair: bool(pair[0])):
        yield trained, [token for _, token in pairs]
