"""Safe reading of folders of others (models, adapters, tasks): regular files only, bounded, JSON, and the types of the
fields of ``config.json``.

Special files are rejected: a read from a pipe blocks forever, and opening a device may have side effects. A link to a
file outside the folder is rejected because an export would publish that file.

A field of ``config.json`` that is absent or null has the default of its family. A field of a wrong type is rejected
with file and key, before any computation uses it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bridges.errors import BridgeError

_OPENED = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".bin", ".metadata", ".distcp")
"""Suffixes of the files that loaders of models, tokenizers and adapters open."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises :class:`BridgeError` for a special file, else OSError."""
    refuse_special(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def refuse_special(path: Path) -> None:
    """Raise :class:`BridgeError` if ``path`` is a pipe, a socket or a device, without opening it."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):  # the caller's open() reports this
        return
    if kind is not None:
        raise BridgeError(f"{path} is {kind}, not a file: refused; replace it with the file")


def refuse_outside(path: Path, folder: Path) -> None:
    """Raise :class:`BridgeError` if ``path`` is a link to a file that is not in ``folder``.

    In the cache of the Hugging Face hub, links from a snapshot to ``blobs`` of the same repository are allowed.
    """
    if not path.is_symlink() and path.parent == folder:
        return
    real = folder.resolve()
    roots = [real, real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [real]
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in roots):
        raise BridgeError(
            f"{path} is a link to {target}, outside of the folder: refused; replace the link with the file"
        )


def check_folder(folder: Path) -> None:
    """Check all files of a folder that loaders open. Does nothing if ``folder`` is not a folder.

    Raises :class:`BridgeError` for a special file, or a link to a file outside of the folder.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if not entry.name.endswith(_OPENED) or entry.is_file(follow_symlinks=False):
            continue
        path = folder / entry.name
        refuse_special(path)
        if path.is_file():
            refuse_outside(path, folder)


TEXT_BYTES = 1 << 20
"""Most bytes of a text file of others: a README, settings, a Dockerfile."""
TREE_BYTES, TREE_FILES, TREE_DEPTH = 1 << 29, 50_000, 100
"""Most bytes of all files below a folder of others, most entries, and most folders in each other."""


def read_inside(path: Path, folder: Path, most: int = TEXT_BYTES) -> bytes:
    """Return the content of a regular file whose path, with all links followed, is in ``folder``.

    Raises :class:`BridgeError` for a link that leads outside, a special file, and more than ``most`` bytes, which are
    not read; else OSError.
    """
    try:
        target, real = path.resolve(strict=True), folder.resolve(strict=True)
    except (ValueError, RuntimeError) as error:  # a NUL in the name; links in a circle
        raise BridgeError(f"{path} cannot be found: {error}; replace the link with the file") from error
    if not target.is_relative_to(real):
        raise BridgeError(f"{path} leads to {target}, outside of {folder}: refused; replace the link with the file")
    with open_regular(target) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise BridgeError(f"{path} has {size:,} bytes, more than {most:,}: refused; make it smaller")
    return content


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A file, folder or link below a folder. ``name``: relative, with ``/``. ``mode``, ``size``: of ``lstat``;
    ``link``: where a link leads, as it is written, else None."""

    name: str
    mode: int
    size: int
    link: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.link is None and stat.S_ISREG(self.mode)


def list_tree(folder: Path) -> list[TreeEntry]:
    """Return all entries below a folder in the order of their names. No link is followed, and no file is opened.

    Raises :class:`BridgeError` for a folder that is a link itself, a special file, a name that is not UTF-8, and more
    entries, bytes or depth than the bounds above; else OSError.
    """
    if folder.is_symlink():
        raise BridgeError(f"{folder} is a link: refused; replace it with the folder")
    entries: list[TreeEntry] = []
    size, waiting = 0, [("", 0)]
    while waiting:
        inside, depth = waiting.pop()
        with os.scandir(folder / inside) as listing:
            for entry in listing:
                name = f"{inside}/{entry.name}".lstrip("/")
                path, state = folder / name, entry.stat(follow_symlinks=False)
                if (kind := _KINDS.get(stat.S_IFMT(state.st_mode))) is not None:
                    raise BridgeError(f"{path} is {kind}, not a file: refused; replace it with the file")
                if not name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in name):
                    raise BridgeError(f"{folder} has a name that is not UTF-8 ({name!r:.80}): refused; rename it")
                link = os.readlink(path) if stat.S_ISLNK(state.st_mode) else None
                entries.append(TreeEntry(name, state.st_mode, state.st_size, link))
                size += state.st_size if stat.S_ISREG(state.st_mode) else 0
                if stat.S_ISDIR(state.st_mode):
                    waiting.append((name, depth + 1))
                for value, most, what in (
                    (len(entries), TREE_FILES, "entries"), (size, TREE_BYTES, "bytes"), (depth, TREE_DEPTH, "levels")
                ):  # fmt: skip
                    if value > most:
                        raise BridgeError(f"{folder} has more than {most:,} {what} ({path}): refused; make it smaller")
    return sorted(entries, key=lambda entry: entry.name)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the content of all regular files below a folder by relative name.

    A link to a file in the folder is read as that file. Raises :class:`BridgeError` for another link, and as
    :func:`list_tree` does; else OSError.
    """
    contents = {}
    for entry in list_tree(folder):
        if not (entry.is_file or entry.link is not None):
            continue
        path = folder / entry.name
        try:
            contents[entry.name] = read_inside(path, folder, TREE_BYTES)
        except (IsADirectoryError, FileNotFoundError) as error:
            if entry.link is None:
                raise
            kind = "a folder" if path.is_dir() else "nothing"
            raise BridgeError(f"{path} is a link to {kind} ({entry.link}): refused; remove it") from error
    return contents


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "decoder_sparse_step", "moe_layer_interval", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings", "n_group",
)  # fmt: skip
_COUNTS = (
    "shared_expert_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "n_shared_experts", "num_shared_experts",
    "moe_num_shared_experts", "num_experts_per_tok", "moe_k", "num_nextn_predict_layers", "num_mtp_modules",
    "first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index", "kv_lora_rank", "q_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "topk_group", "index_head_dim", "index_n_heads",
    "index_topk",
)  # fmt: skip
_BY_LAYER = ("intermediate_size", "moe_intermediate_size", "moe_num_experts")
_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor")
_OBJECTS = ("quantization_config", "rope_scaling", "rope_parameters", "auto_map", "text_config")
_LISTS = ("mlp_only_layers", "layer_types", "mlp_layer_types", "architectures")
_MOST = 2**40  # upper bound of a plausible size


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < _MOST


def _is_count(value: Any) -> bool:
    return type(value) is int and -1 <= value < _MOST


def _is_count_or_counts(value: Any) -> bool:
    """Return whether it is a count, or a list of counts per layer, which unknown families may have."""
    return _is_count(value) or (isinstance(value, list) and all(map(_is_count, value)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, int | str) for each in value)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (_is_size, "a whole number of at least 1")),
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number")),
    **dict.fromkeys(_BY_LAYER, (_is_count_or_counts, "a whole number")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(_OBJECTS, (lambda value: isinstance(value, Mapping), "a JSON object")),
    **dict.fromkeys(_LISTS, (_is_list, "a list of names or numbers")),
    "model_type": (lambda value: isinstance(value, str), "a name"),
}


def check_fields(config: Mapping[str, Any], where: str) -> None:
    """Raise :class:`BridgeError` for a field of a wrong type. The message has ``where``, the key and its value."""
    for key, (fits, expected) in _FIELDS.items():
        value = config.get(key)
        if value is not None and not fits(value):
            raise BridgeError(f"{where}: {key}={value!r:.80} must be {expected}; fetch the file again")


CONFIG = "config.json"
JSON_BYTES = 1 << 29
"""Most bytes of a JSON file: indices and tokenizers of released models have tens of MB."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a HF folder. Raises :class:`BridgeError` if it is missing, damaged or mistyped."""
    config = read_json(folder / CONFIG)
    check_fields(config, str(folder / CONFIG))
    if holds_text_model(config):
        check_fields(config["text_config"], f"{folder / CONFIG}, text_config")
    return config


_OF_THE_WHOLE = ("auto_map", "quantization_config", "architectures", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys of a model of text and images that its language model may lack."""


def holds_text_model(config: Mapping[str, Any]) -> bool:
    """Return whether ``config.json`` is of a model of text and images, with the language model in ``text_config``."""
    return isinstance(config.get("text_config"), Mapping)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of the language model: the whole, or ``text_config`` of a model of text and images.

    Raises :class:`BridgeError` if they differ in ``tie_word_embeddings``, because libraries read either.
    """
    if not holds_text_model(config):
        return dict(config)
    inner, tie = config["text_config"], "tie_word_embeddings"
    if None not in (config.get(tie), inner.get(tie)) and config[tie] != inner[tie]:
        raise BridgeError(f"config.json has {tie}={config[tie]!r}, its text_config {inner[tie]!r}: make them agree")
    shared = {key: config[key] for key in _OF_THE_WHOLE if key in config}
    return {**shared, "model_type": f"{config.get('model_type')}_text", **inner}


def with_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` with keys of the language model replaced by ``changes``."""
    if not holds_text_model(config):
        return {**config, **changes}
    whole = {key: changes[key] for key in _OF_THE_WHOLE if key in changes and key in config}
    return {**config, **whole, "text_config": {**config["text_config"], **changes}}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises :class:`BridgeError` with the path of the file."""
    try:
        with open_regular(path) as file:
            content = file.read(JSON_BYTES + 1)
    except OSError as error:
        raise BridgeError(f"{path}: {error.strerror}; is this a HF folder?") from error
    if len(content) > JSON_BYTES:
        raise BridgeError(f"{path} has more than {JSON_BYTES:,} bytes; fetch the file again")
    return parse_json(content, str(path))


def parse_json(content: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises :class:`BridgeError` with ``where``, the origin of the text."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BridgeError(f"{where} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise BridgeError(f"{where} must hold a JSON object, not a {type(value).__name__}; fetch the file again")
    return value


SAMPLES, SAMPLE_BYTES = 64, 64 * 2**10


def weights_fingerprint(folder: Path) -> str:
    """Return a BLAKE3 hash over every safetensors file of a folder: name, size, header, and 64 samples of 64 KiB
    spread evenly over its data (all data of a smaller file). It is equal for copies of the folder. After a training
    step every sample differs."""
    import blake3  # of those who read files, few hash weights

    hasher = blake3.blake3()
    for path in sorted(folder.glob("*.safetensors")):
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            hasher.update(f"{path.name}\0{size}\0".encode())
            header = file.read(8)
            hasher.update(header + file.read(min(int.from_bytes(header, "little"), size)))
            start = file.tell()
            for offset in _sample_offsets(start, size):
                # pread: no seek, so the file's position after the header is not needed
                hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return hasher.hexdigest()


def _sample_offsets(start: int, stop: int) -> list[int]:
    """Return the first byte of each sample of ``[start, stop)``."""
    if stop - start <= SAMPLES * SAMPLE_BYTES:
        return list(range(start, stop, SAMPLE_BYTES))
    return [start + (stop - start - SAMPLE_BYTES) * piece // (SAMPLES - 1) for piece in range(SAMPLES)]
