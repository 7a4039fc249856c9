"""The layouts that are tested for each family. The parity tests, ``list`` and docs/families.md read this table.

Tests of every family check that names and shapes on disk equal those of transformers, that round trips through tensors
and folders are bitwise exact, and that splits over tp, etp and padded vocabularies are exactly invertible. In the
layouts of ``LAYOUTS``, logits and the gradients of all parameters equal those of transformers.
"""

from __future__ import annotations

LAYOUTS: dict[str, tuple[str, ...]] = {
    "llama": ("single", "tp2", "pp2"),
    "qwen2": ("single", "tp2", "pp2"),
    "qwen3": ("single", "tp2", "cp2"),
    "qwen2_moe": ("single", "tp2", "ep2"),
    "qwen3_moe": (
        "single",
        "tp2",
        "pp2",
        "pp2·vpp2",
        "cp2",
        "ep2",
        "tp2·etp2",
        "tp2·cp2·ep4",
        "pp2·cp2·ep2",
        "dp2·ep2",
    ),
    "mixtral": ("single", "tp2", "ep2"),
    "olmoe": ("single", "tp2", "tp2·ep2", "cp2"),
    "deepseek_v3": ("single", "tp2", "tp2·ep2", "cp2"),
    "glm4_moe": ("single", "tp2", "tp2·ep2", "pp2"),
    "gpt_oss": ("single", "tp2", "tp2·ep2", "cp2"),
    "minimax_m2": ("single", "tp2", "ep2", "pp2", "cp2"),
    "dots1": ("single", "tp2", "ep2", "pp2", "cp2"),
    "glm4_moe_lite": ("single", "tp2", "ep2", "pp2", "cp2"),
    "ernie4_5_moe": ("single", "tp2", "ep2", "pp2", "cp2"),
    "hy_v3": ("single", "tp2", "ep2", "pp2", "cp2"),
    "qwen3_next": ("single", "tp2", "ep2", "pp2", "cp2"),
    "qwen3_5_moe_text": ("single", "tp2", "ep2", "pp2", "cp2"),
    "mimo_v2_flash": ("single", "tp2", "ep2", "pp2", "cp2"),
    "deepseek_v32": ("single", "tp2", "ep2", "pp2", "cp2"),
    "glm_moe_dsa": ("single", "tp2", "ep2", "pp2", "cp2"),
    "solar_open": ("single", "tp2", "ep2", "pp2", "cp2"),
}
"""Family → layouts of the parity tests (``tests/bridges/test_parity.py``). Omitted degrees are 1; dp is large enough
for ep. Empty: only the conversion is tested."""


def degrees(layout: str) -> dict[str, int]:
    """Parse a layout: ``"tp2·ep2"`` → ``{"tp": 2, "ep": 2}``; ``"single"`` → ``{}``."""
    if layout == "single":
        return {}
    return {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in layout.split("·")}
