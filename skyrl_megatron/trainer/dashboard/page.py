"""One file that holds a dashboard and its data: HTML, style, script and numbers, nothing from elsewhere.

The data is a block of bytes: the length of a header as little-endian uint32, the header as JSON padded with spaces to
a multiple of four, then float32 columns of each run, one run after the other. In a file it is deflated, in base64.
"""

from __future__ import annotations

import base64
import json
import struct
import warnings
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import LaunchError, SkyRLMegatronWarning
from skyrl_megatron.trainer.dashboard.columns import thinned
from skyrl_megatron.trainer.dashboard.reading import RunReader
from skyrl_megatron.trainer.metric_table import describe

STATIC = Path(__file__).with_name("static")
SCRIPTS = ("data", "charts", "panels", "time", "experts", "strip", "samples", "compare", "main")
"""Parts of the page's script, in the order in which they need each other."""
SPAN_BYTES = 1_500_000
EXPERT_BYTES = 1_000_000
SAMPLE_BYTES = 3_000_000
"""Of a file, all runs together; a server gives more when asked."""


def data_block(
    runs: Sequence[RunReader], *, samples: bool = False, live: bool = False, known: Sequence[tuple[int, int]] = ()
) -> bytes:
    """Return what the page shows of the runs. ``samples``: with as many as a file may hold. ``live``: a server answers
    for the rest. ``known``: life and lines of each run that the page has; it gets what came after them."""
    described, blocks = [], []
    for number, run in enumerate(runs):
        life, lines = known[number] if number < len(known) else (-1, 0)
        after = lines if life == run.life else 0
        values = run.columns.values(after)
        if after == 0:
            values = thinned(values)
        age = run.age_s()
        described.append(
            {
                "name": run.name,
                "folder": str(run.folder),
                "life": run.life,
                "lines": run.columns.rows,
                "after": after,
                "age_s": age,
                "names": run.columns.names(),
                "rows": values.shape[1],
                "config": run.config(),
                "log": run.log_tail(),
                "spans": run.spans(SPAN_BYTES // len(runs)),
                "experts": run.expert_loads(EXPERT_BYTES // len(runs)),
                "sample_steps": run.sample_steps(),
                "samples": _some_samples(run, SAMPLE_BYTES // len(runs)) if samples else {},
            }
        )
        blocks.append(np_bytes(values))
    names = sorted({name for run in runs for name in run.columns.names()})
    header = json.dumps({"live": live, "runs": described, "metrics": _descriptions(names)}).encode()
    header += b" " * (-len(header) % 4)
    return b"".join([struct.pack("<I", len(header)), header, *blocks])


def np_bytes(values: Any) -> bytes:
    """Return the columns of [names, rows] float32, little-endian."""
    return bytes(values.astype("<f4").tobytes())


def page(runs: Sequence[RunReader], *, live: bool = False) -> str:
    """Return the whole page, for a file, or ``live`` for the server that answers its questions."""
    packed = base64.b64encode(zlib.compress(data_block(runs, samples=not live, live=live), 6)).decode()
    title = " · ".join(run.name for run in runs)
    return _frame().replace("{{title}}", title.replace("<", "&lt;")).replace("{{data}}", packed)


def write_page(runs: Sequence[RunReader], path: Path) -> int:
    """Write the page to ``path``, at once for whoever reads it, and return its size in bytes."""
    text = page(runs).encode()
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(text)
    beside.replace(path)
    return len(text)


@cache
def _frame() -> str:
    frame = (STATIC / "page.html").read_text()
    script = "\n".join((STATIC / f"{name}.js").read_text() for name in SCRIPTS)
    return frame.replace("{{style}}", (STATIC / "style.css").read_text()).replace("{{script}}", script)


def _descriptions(names: Sequence[str]) -> dict[str, list[str]]:
    """Return unit, meaning and what a bad value points to, by metric."""
    found = {name: describe(name) for name in names}
    return {name: [row.unit, row.meaning, row.bad] for name, row in found.items() if row is not None}


def _some_samples(run: RunReader, most_bytes: int) -> dict[str, Any]:
    """Return samples by step: of the newest step, the first, and further ones evenly between them while they fit.
    Warns of those that cannot be shown."""
    steps, chosen, left = run.sample_steps(), dict[str, Any](), most_bytes
    order = [*steps[-1:], *steps[:1], *(steps[len(steps) * part // 16] for part in range(1, 16) if steps)]
    for step in dict.fromkeys(order):
        try:
            text = run.sample_text(step)
        except LaunchError as error:
            warnings.warn(f"{error}; left out", SkyRLMegatronWarning, stacklevel=2)
            continue
        if len(text) <= left:
            chosen[str(step)] = json.loads(text)
            left -= len(text)
    return chosen
