"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridges.errors import BridgeError
from bridges.files import check_folder
from skyrl_megatron.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIAL = "What is 1 + 1?\n\té 汉"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the vocabulary of a tokenizer."""
    return any(any(folder.glob(name)) for name in (*VOCABULARIES, "*.tiktoken"))


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False, padding_side: str = "left"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; one without a padding token pads with its end of sequence.

    Raises ModelLoadError where the folder holds none (transformers would make an empty one), or none that loads.
    """
    from transformers import AutoTokenizer

    path = Path(folder).expanduser()
    if path.is_dir() and not trust_remote_code and not has_tokenizer(path):
        raise ModelLoadError(
            f"{path} holds no tokenizer ({', '.join(VOCABULARIES[:2])}, …): fetch the tokenizer's files too"
        )
    try:
        check_folder(path)
    except BridgeError as error:
        raise ModelLoadError(str(error)) from error
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path) if path.is_dir() else str(folder), trust_remote_code=trust_remote_code
        )
        tokenizer.padding_side = padding_side
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.decode(tokenizer.encode(_TRIAL, add_special_tokens=False))  # much is first looked at when it is used
    except Exception as error:  # whatever tokenizers, sentencepiece and JSON raise for files that are damaged
        raise ModelLoadError(
            f"{folder}: the tokenizer cannot be loaded: {_first_line(error)}; fetch it again"
        ) from error
    return tokenizer


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
