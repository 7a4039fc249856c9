"""Whether the ids of a tokenizer, and those that a model folder names, have a row in the model's embedding.

A token without a row is an IndexError in an embedding on one rank. With a vocabulary that is split over tp ranks it
trains one of the rows of padding, or none, and the export lacks it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.errors import BridgeError
from bridges.files import read_json, text_config
from bridges.rules import padded_rows
from skyrl_megatron.errors import ModelLoadError, SkyRLMegatronWarning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_megatron.config.schema.generator import GeneratorConfig

_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>")
CONFIG, GENERATION = "config.json", "generation_config.json"
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_NO_TOKEN = (None, -1)
"""What config files write for a token that does not exist."""


def require_vocabulary(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, tp: int = 1, stops: Sequence[int] = ()
) -> None:
    """Raise ModelLoadError if a token of ``tokenizer``, one that a file of ``folder`` names, or one of ``stops`` has
    no row in the model. Warn if the tokenizer's end or padding token is none of the model's.

    ``tp``: ranks that split the vocabulary, for the message. A folder without ``vocab_size`` is not checked.
    """
    files = {name: _read(folder / name) for name in (CONFIG, GENERATION)}
    rows = files[CONFIG].get("vocab_size")
    if not isinstance(rows, int):
        return
    named: dict[str, list[int]] = {"the settings name stop_token_ids": list(stops)}
    for name, values in files.items():
        for key in _SPECIAL:
            named[f"{name} names {key}"] = _ids(values.get(key))
    wrong = [*_without_row(tokenizer, rows)]
    for what, tokens in named.items():
        wrong += [f"{what} {token}" for token in tokens if not 0 <= token < rows]
    if wrong:
        padded = f" ({padded_rows(rows, tp)} with the padding for tp={tp})" if tp > 1 else ""
        raise ModelLoadError(
            f"{'; '.join(wrong)}, but the model has {rows} rows of tokens{padded}, vocab_size of {CONFIG}: use the "
            "tokenizer that the model was made with, or a model whose embedding was resized to the tokenizer"
        )
    _warn_of_conflicts(tokenizer, files)


def configured_stops(generator: GeneratorConfig) -> list[int]:
    """Return the ``stop_token_ids`` of all sampling parameters."""
    settings = [params for params in (generator.sampling_params, generator.eval_sampling_params) if params is not None]
    return [token for params in settings for token in _ids((params.additional_kwargs or {}).get("stop_token_ids"))]


def require_one_start(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
    """Raise ModelLoadError if a rendered ``prompt`` begins with the beginning-of-sequence token twice."""
    start = tokenizer.bos_token_id
    if start is not None and list(prompt[:2]) == [start, start]:
        raise ModelLoadError(
            f"prompts begin with {tokenizer.bos_token!r} (id {start}) twice: it is written by the chat template and "
            "again by what the template includes or the tokenizer adds; remove one of them from the template"
        )


def named_tokens(folder: Path, key: str) -> set[int]:
    """Return the ids that ``config.json`` and ``generation_config.json`` of a folder name as ``key``."""
    return {token for name in (CONFIG, GENERATION) for token in _ids(_read(folder / name).get(key))}


def padding_token(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> int:
    """Return a token to pad with that is not the tokenizer's end token or one of ``ends``: the tokenizer's own, else
    another special token, else the first token of the vocabulary that it can be."""
    special = (tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids)
    wrong = {*ends, tokenizer.eos_token_id, None}
    return int(next(token for token in (*special, *sorted(tokenizer.get_vocab().values())) if token not in wrong))


def warn_of_split_markers(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Warn of markers like ``<|im_end|>`` in a ``template`` that the tokenizer has no token for."""
    vocabulary = tokenizer.get_vocab()
    absent = [marker for marker in dict.fromkeys(_MARKER.findall(template)) if marker not in vocabulary]
    if absent:
        warnings.warn(
            f"generator.chat_template writes {', '.join(absent)}, which the tokenizer splits into several tokens: no "
            "engine stops at them; use a template for this model's own tokens",
            SkyRLMegatronWarning,
            stacklevel=2,
        )


def _read(path: Path) -> dict[str, Any]:
    """Return a configuration, of a model of text and images that of the language model."""
    try:
        return text_config(read_json(path))
    except BridgeError:
        return {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and token not in _NO_TOKEN]


def _without_row(tokenizer: PreTrainedTokenizerBase, rows: int) -> Iterator[str]:
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if beyond:
        number, token = beyond[-1]
        others = "" if len(beyond) == 1 else f", from {beyond[0][1]!r} with id {beyond[0][0]} on"
        yield f"the tokenizer has {token!r} with id {number} ({len(beyond)} such tokens{others})"


def _warn_of_conflicts(tokenizer: PreTrainedTokenizerBase, files: Mapping[str, Mapping[str, Any]]) -> None:
    for key, kind, token in (
        ("eos_token_id", "end", tokenizer.eos_token_id),
        ("pad_token_id", "padding", tokenizer.pad_token_id),
    ):
        named = {name: _ids(values.get(key)) for name, values in files.items()}
        every = [number for numbers in named.values() for number in numbers]
        is_default = kind == "padding" and token == tokenizer.eos_token_id  # of a tokenizer without such a token
        if token is None or is_default or not every or token in every:
            continue
        others = ", ".join(f"{name} has {numbers}" for name, numbers in named.items() if numbers)
        warnings.warn(
            f"the tokenizer's {kind} token is {tokenizer.convert_ids_to_tokens(token)!r} (id {token}), {others} "
            f"({key}): set one of them in all files of the model",
            SkyRLMegatronWarning,
            stacklevel=2,
        )
