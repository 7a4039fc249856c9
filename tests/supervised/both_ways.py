"""Rows as one process tokenizes them one by one, and as they are in the cache: they must be the same."""

from __future__ import annotations

import tempfile
from pathlib import Path


def items_of(rows):
    """All items of rows."""
    return [rows[place] for place in range(len(rows))]


def rows_both_ways(kind, names, chat, settings, say):
    """The rows of a class, after a comparison with those of an empty and of a full cache: items, errors, and what is
    said."""
    from skyrl_megatron.data.row_cache import RowCache
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.row_tokens import cached_rows

    said: list[str] = []
    rows, error = None, None
    try:
        rows = kind(names, chat, settings, say=said.append)
    except DataError as refused:
        error = refused
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            of_cache: list[str] = []
            try:
                cached = cached_rows(
                    kind, names, chat, settings, cache=RowCache(10**9, Path(folder)), say=of_cache.append
                )
            except DataError as refused:
                assert str(refused) == str(error)
                continue
            assert error is None, error
            assert items_of(cached) == items_of(rows) and cached.tokens is not None and cached.tokens.is_complete
            assert sorted(of_cache[1:]) == sorted(said) and of_cache[0].endswith(f"cached in {folder}")
            cached.tokens.close()
    for line in said:
        say(line)
    if error is not None:
        raise error
    return rows
