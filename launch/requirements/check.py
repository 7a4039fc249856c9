"""The last step of ``launch/setup.sh``: is this environment whole, and which layers will a run be built from?

    python launch/requirements/check.py [cpu|gpu|te]

Exit code 1, with the reason and what to do, if two packages brought different files under one path (the one unpacked
last wins), or something a run imports does not import. Standard library only, so that it also runs in a broken one.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

EVERYWHERE = ("torch", "megatron.core", "ray", "transformers", "skyrl_megatron", "bridges", "vllm.engine.arg_utils")
IMPORTS = {
    "cpu": EVERYWHERE,
    "gpu": ("torch", "transformer_engine.pytorch", *EVERYWHERE),  # torch loads the libraries that it links against
    "te": ("torch", "transformer_engine.pytorch", *EVERYWHERE),
}
ENGINE_KERNELS = "vllm._C_stable_libtorch"
"""Links against the driver: importable, and imported, where there is one."""
HARMLESS = {"build_backend.py"}
"""Build scripts that wheels ship by mistake (flashinfer-python, torch-c-dlpack-ext); nothing imports them."""


def clashes(site_packages: Path) -> dict[tuple[str, ...], list[str]]:
    """Return paths that several packages' RECORDs list with different hashes, by the packages that do.

    The same file twice is no clash: Transformer Engine's two packages share their Python files.
    """
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for record in sorted(site_packages.glob("*.dist-info/RECORD")):
        with record.open(newline="", encoding="utf-8") as rows:
            for path, digest, *_ in csv.reader(rows):
                owners[path][record.parent.name.removesuffix(".dist-info")] = digest
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, packages in owners.items():
        if len(set(packages.values())) > 1 and path not in HARMLESS:
            found[tuple(packages)].append(path)
    return found


def file_problems(site_packages: Path) -> Iterator[str]:
    """Yield a line for each set of packages that overwrite each other's files."""
    for packages, paths in clashes(site_packages).items():
        shown = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
        yield (
            f"files: {' and '.join(packages)} both bring {len(paths)} paths with different contents ({shown}); "
            "constrain one of them in launch/requirements/cuda.in and run launch/requirements/lock.sh"
        )


def import_problems(names: tuple[str, ...]) -> Iterator[str]:
    """Import each name; yield a line for each that fails."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield f"import {name}: {type(error).__name__}: {error}"


def layers(flavour: str) -> str:
    """Say which layers a run in this environment is built from. Raises RuntimeError if Megatron does not see them."""
    if flavour == "cpu":
        return "skyrl_megatron's own (no GPU)"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise RuntimeError("Megatron does not find Transformer Engine although it imports")
    from torch import __version__ as torch_version

    return f"Transformer Engine {version('transformer-engine-torch')}, built with torch {torch_version}"


def main() -> int:
    """Check this interpreter's environment and print what is wrong with it, or its layers."""
    parser = argparse.ArgumentParser(description="Is this environment whole, and which layers does a run use?")
    parser.add_argument("flavour", nargs="?", default="cpu", choices=sorted(IMPORTS))
    flavour = parser.parse_args().flavour
    names = IMPORTS[flavour]
    if flavour == "gpu" and Path("/proc/driver/nvidia/version").exists():
        names = (*names, ENGINE_KERNELS)
    problems = [*file_problems(Path(sysconfig.get_paths()["purelib"])), *import_problems(names)]
    if not problems:
        try:
            print(f"layers: {layers(flavour)}")
            return 0
        except RuntimeError as error:
            problems = [str(error)]
    print("\n".join(problems), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
