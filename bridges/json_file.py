"""Read the JSON files of a HF folder. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bridges.config_fields import check_fields
from bridges.errors import BridgeError
from bridges.files import open_regular

CONFIG = "config.json"


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a HF folder. Raises :class:`BridgeError` naming the file, and a key whose value is of
    another type than the key's."""
    config = read_json(folder / CONFIG)
    check_fields(config, str(folder / CONFIG))
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises :class:`BridgeError` naming the file."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise BridgeError(f"{path}: {error.strerror}; is this a HF folder?") from error
    return parse_json(content, str(path))


def parse_json(content: str | bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that a text holds. Raises :class:`BridgeError` naming ``where`` it is from."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BridgeError(f"{where} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise BridgeError(f"{where} must hold a JSON object, not a {type(value).__name__}; fetch the file again")
    return value
