"""Pack what a GPU run needs beside torch and transformers into files that fit through a narrow door.

    launch/gpu_bundle.sh [--out gpu_bundle] [--arch 90] [--part-mib 50] [--only packages,ray,te,vllm]

For a machine without network whose image has Python 3.12, torch, Triton, transformers, peft and pytest (torch may be
older than the locked one: vLLM's compiled parts use its stable interface). Versions are those of ``gpu.txt``. A shared
library of CUDA kernels holds the same code for seven generations of GPUs: what is not for ``--arch`` is overwritten
with zeros, which compress to nothing (vLLM's and Transformer Engine's 670 MB of wheels become 80 MB).

``DIR`` gets parts of at most ``--part-mib`` MiB and ``install.sh``. On the machine::

    bash DIR/install.sh [TARGET]      # unpacks the parts that are there; may be called again when more have arrived
    source TARGET/environment.sh      # PYTHONPATH, PATH
    launch/gpu_hour.sh
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
FATBIN = struct.pack("<I", 0xBA55ED50)
"""First bytes of a fat binary. Its entries follow, each with a header (kind, length) and one generation's code."""
PTX, CUBIN = 1, 2
LEFT_OUT = {
    "packages": ["mistral_common/data", "pycountry/locales", "bin/ruff"],
    "ray": ["ray/jars", "ray/dashboard/client", "ray/cpp", "ray/rllib", "ray/llm"],
    "te": ["transformer_engine/wheel_lib/libnccl_ep.so"],
    "vllm": [
        "vllm/vllm-rs",
        "vllm/third_party/fmha_sm100",
        "vllm/third_party/deep_gemm",
        "vllm/entrypoints/serve/instrumentator/static",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/_flashkda_C.abi3.so",
        "vllm/_deepselect_C.abi3.so",
        "vllm/_flashmla_C.abi3.so",
        "vllm/_flashmla_extension_C.abi3.so",
        "vllm/_qutlass_C.abi3.so",
    ],
}
"""Of each group, what a text-only bf16 run on a Hopper GPU does not load."""
INSTALL = """\
#!/usr/bin/env bash
# Unpack the parts beside this file into TARGET (/tmp/skyrl-site); compile Transformer Engine's torch extension.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-/tmp/skyrl-site}
mkdir -p "$target/site" "$target/te"
for group in packages vllm ray te; do
  if [ -e "$target/.$group" ] || [ ! -e "$here/$group.parts" ]; then continue; fi
  parts=("$here/$group.tar.xz."*)
  if [ "$(cat "$here/$group.parts")" != ${#parts[@]} ]; then echo "$group: parts are missing"; continue; fi
  place=site
  if [ $group = te ]; then place=te; fi
  cat "${parts[@]}" | xz -T0 -dc | tar x -C "$target/$place"
  touch "$target/.$group"; echo "$group: unpacked"
done
# megatron-core does not import beside a Transformer Engine without its extension: the path has it once that is built.
cat >"$target/environment.sh" <<END
export PYTHONPATH=$target/site\\${PYTHONPATH:+:\\$PYTHONPATH} PATH=\\$PATH:$target/site/bin
export VLLM_USE_FLASHINFER_SAMPLER=0
if compgen -G "$target/te/transformer_engine/wheel_lib/transformer_engine_torch*.so" >/dev/null; then
  export PYTHONPATH=$target/te:\\$PYTHONPATH
fi
END
if [ -e "$target/.te" ] && [ ! -e "$target/.te-started" ]; then
  touch "$target/.te-started"
  export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
  nvidia=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')/nvidia
  export CPATH=$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include PYTHONPATH=$target/te:$target/site
  export NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 MAX_JOBS=${MAX_JOBS:-$(nproc)}
  setsid nohup sh -c "python3 -m pip install --no-deps --no-build-isolation --no-index --target '$target/te-built' \\
    '$target/te/source' && cp -rn '$target/te-built/.' '$target/te/'" >"$target/te.log" 2>&1 </dev/null &
  echo "te: its torch extension is being compiled (two minutes on 16 cores; $target/te.log)"
fi
"""


def pins() -> dict[str, str]:
    """Return package → version of ``gpu.txt`` for Linux."""
    found: dict[str, str] = {}
    for line in (HERE / "gpu.txt").read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;]+)(.*)", line):
            found.setdefault(match[1], match[2])
    return found


def keep_architecture(path: Path, arch: int) -> None:
    """Overwrite the code of other generations than ``arch`` in a library's fat binaries with zeros; PTX stays."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, size, kind, generation in _entries(data):
            if kind == CUBIN and generation != arch:
                data[start : start + size] = bytes(size)


def _entries(data: mmap.mmap) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, size, kind, generation) of each piece of code."""
    at = data.find(FATBIN)
    while at >= 0:
        _, version, header, length = struct.unpack_from("<IHHQ", data, at)
        end = at + header + length
        if (version, header) != (1, 16) or end > len(data):
            at = data.find(FATBIN, at + 4)
            continue
        entry = at + header
        while entry + 64 <= end:
            kind, _, own_header, size = struct.unpack_from("<HHIQ", data, entry)
            if own_header < 32 or not size:
                break
            yield entry + own_header, size, kind, struct.unpack_from("<I", data, entry + 28)[0]
            entry += own_header + size
        at = data.find(FATBIN, end)


def fetch(group: str, folder: Path, versions: dict[str, str]) -> None:
    """Install a group's packages, without what they need, into ``folder``."""
    names = {
        "packages": [line for line in (HERE / "bundle.in").read_text().splitlines() if not line.startswith("#")],
        "ray": ["ray"],
        "te": ["transformer-engine", "transformer-engine-cu13"],
        "vllm": ["vllm"],
    }[group]
    wanted = [f"{name}=={versions[name]}" for name in names]
    # copies: links to the cache would be changed with what is changed here
    _uv("pip", "install", "--quiet", "--no-deps", "--link-mode", "copy", "--target", str(folder), *wanted)
    if group == "te":
        _te_source(folder, versions)
    for path in LEFT_OUT[group]:
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    for cache in [*folder.rglob("__pycache__")]:
        shutil.rmtree(cache)


def _te_source(folder: Path, versions: dict[str, str]) -> None:
    """Add the source of Transformer Engine's torch extension, and cuDNN's headers that it is compiled with."""
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        (temporary / "frontend").mkdir()
        frontend = f"nvidia-cudnn-frontend=={versions['nvidia-cudnn-frontend']}"
        _uv("pip", "install", "--quiet", "--no-deps", "--target", str(temporary / "frontend"), frontend)
        for path in [temporary / "frontend/include", *(temporary / "frontend").glob("*.dist-info")]:
            shutil.copytree(path, folder / path.name)
        source = f"transformer-engine-torch=={versions['transformer-engine-torch']}"
        # its name and version are asked of its own build, which needs setuptools and torch: those of .venv
        command = [sys.executable, "-m", "pip", "--python", str(HERE.parents[1] / ".venv/bin/python"), "download"]
        command += ["--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--no-binary", "transformer-engine-torch", "-d", name, source], check=True)
        (folder / "source").mkdir()
        archive = next(temporary.glob("transformer_engine_torch*.tar.gz"))
        subprocess.run(["tar", "xzf", archive, "-C", folder / "source", "--strip-components=1"], check=True)


def _uv(*arguments: str) -> None:
    uv = shutil.which("uv") or str(HERE.parents[1] / ".venv/tools/bin/uv")
    subprocess.run([uv, *arguments, "--python", sys.executable], check=True)


def pack(folder: Path, out: Path, group: str, part_bytes: int) -> int:
    """Write ``group.tar.xz.00`` and so on; return the bytes of all."""
    for old in out.glob(f"{group}.tar.xz.*"):
        old.unlink()
    archive = out / f"{group}.tar.xz"
    with archive.open("wb") as file:
        tar = subprocess.Popen(["tar", "c", "-C", folder, "."], stdout=subprocess.PIPE)
        subprocess.run(["xz", "-T0", "-4", "-c"], stdin=tar.stdout, stdout=file, check=True)
        if tar.wait():
            raise SystemExit(f"tar of {group} failed")
    size, count = archive.stat().st_size, 0
    with archive.open("rb") as file:
        while part := file.read(part_bytes):
            (out / f"{group}.tar.xz.{count:02d}").write_bytes(part)
            count += 1
    archive.unlink()
    (out / f"{group}.parts").write_text(str(count))
    return size


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="launch/gpu_bundle.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_bundle"))
    parser.add_argument("--arch", type=int, default=90, help="generation of the GPU: 90 for H100 and H200")
    parser.add_argument("--part-mib", type=int, default=50)
    parser.add_argument("--only", default="packages,ray,te,vllm", help="groups, separated by commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    versions = pins()
    for group in args.only.split(","):
        if group not in LEFT_OUT:
            parser.error(f"--only: no group {group}; there are {', '.join(LEFT_OUT)}")
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
            folder = Path(name)
            fetch(group, folder, versions)
            for library in [*folder.rglob("*.so"), *folder.rglob("*.so.*")]:
                keep_architecture(library, args.arch)
            size = pack(folder, args.out, group, args.part_mib << 20)
        print(f"{group:9s} {size / 1e6:6.1f} MB in {(args.out / f'{group}.parts').read_text()} parts", flush=True)
    script = args.out / "install.sh"
    script.write_text(INSTALL)
    script.chmod(0o755)
    print(f"bundle: {args.out}")


if __name__ == "__main__":
    main()
