"""What is packed for a GPU machine without network: one generation's code, in parts that are put together again."""

import os
import re
import runpy
import struct
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bundle():
    return runpy.run_path(str(ROOT / "launch/requirements/bundle.py"))


def piece(kind: int, generation: int, code: bytes) -> bytes:
    """An entry of a fat binary: a header of 64 bytes, then code."""
    return (
        struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", generation) + bytes(32) + code
    )


def fat_binary(*pieces: bytes) -> bytes:
    text = b"".join(pieces)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(text)) + text


def test_one_generations_code_is_kept(bundle, tmp_path):
    """PTX too, as a kernel without code for this generation is compiled from it; nothing else of the file changes."""
    codes = {name: bytes([number]) * 96 for number, name in enumerate(("old", "ours", "ptx", "next", "again"), 1)}
    text = b"\x7fELF before" + fat_binary(
        piece(2, 80, codes["old"]), piece(2, 90, codes["ours"]), piece(1, 80, codes["ptx"])
    )
    text += (
        b"\x50\xed\x55\xba no fat binary"
        + fat_binary(piece(2, 120, codes["next"]), piece(2, 90, codes["again"]))
        + b"end"
    )
    path = tmp_path / "lib.so"
    path.write_bytes(text)
    bundle["keep_architecture"](path, 90)
    expected = text.replace(codes["old"], bytes(96)).replace(codes["next"], bytes(96))
    assert path.read_bytes() == expected


def test_versions_are_those_of_the_lock(bundle):
    versions = bundle["pins"]()
    names = [line for line in (ROOT / "launch/requirements/bundle.in").read_text().splitlines() if line[0] != "#"]
    assert set(names) <= versions.keys() and names == sorted(names)
    assert {"vllm", "ray", "transformer-engine-torch", "nvidia-cudnn-frontend"} <= versions.keys()


def test_a_bare_machine_and_the_bundle_have_every_dependency():
    """Each once; the groups beside ``packages`` have one package each."""
    folder = ROOT / "launch/requirements"
    bare, packed = (re.findall(r"(?m)^([\w-]+)", (folder / name).read_text()) for name in ("bare.in", "bundle.in"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["gpu"]
    wanted = {re.match(r"[\w-]+", each)[0] for each in needed} - {"ray", "vllm", "transformer-engine"}
    assert wanted <= {*bare, *packed} and not set(bare) & set(packed)


@pytest.mark.process
def test_parts_become_folders_once_all_are_there(bundle, tmp_path):
    """A part that has not arrived is waited for by another call; what is there already is left alone."""
    source, out, target = tmp_path / "source", tmp_path / "out", tmp_path / "target"
    for folder in (source / "module", out):
        folder.mkdir(parents=True)
    (source / "module/file.py").write_bytes(os.urandom(3000))
    bundle["pack"](source, out, "packages", 1024)
    (out / "install.sh").write_text(bundle["INSTALL"])
    parts = sorted(out.glob("packages.tar.xz.*"))
    assert len(parts) > 2 and (out / "packages.parts").read_text() == str(len(parts))

    def install() -> str:
        command = ["bash", out / "install.sh", target]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    late = parts[1].read_bytes()
    parts[1].unlink()
    assert install() == "packages: parts are missing\n"
    parts[1].write_bytes(late)
    assert install() == "packages: unpacked\n" and install() == ""
    assert (target / "site/module/file.py").read_bytes() == (source / "module/file.py").read_bytes()
    shown = f"set -u; source {target}/environment.sh; echo $PYTHONPATH"
    found = subprocess.run(
        ["bash", "-c", shown], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=True
    )
    assert found.stdout == f"{target}/site\n"
