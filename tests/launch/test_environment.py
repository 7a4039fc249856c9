"""What an environment is made of: the locks agree with each other, no package overwrites another's files, and the last
step of ``launch/setup.sh`` ends on what a run could not import."""

import importlib.util
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "launch" / "requirements"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("environment_check", REQUIREMENTS / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked(name: str) -> dict[str, str]:
    """Return the versions that a lock gives this machine."""
    lines = (Requirement(line) for line in (REQUIREMENTS / name).read_text().splitlines() if "==" in line)
    return {
        pin.name: str(pin.specifier).removeprefix("==") for pin in lines if not pin.marker or pin.marker.evaluate()
    }


def test_the_locks_agree_on_what_transformer_engine_is_built_with():
    gpu, cpu, te = locked("gpu.txt"), locked("cpu.txt"), locked("te.txt")
    for package in ("torch", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "megatron-core"):
        assert gpu[package] == cpu[package] == te.get(package, cpu[package]), package
    for package in ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"):
        assert gpu[package] == te[package], package
    assert set(te) >= {"ninja", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl"}


def test_the_cuda_compiler_is_the_runtimes_release():
    """A newer compiler's PTX needs a newer driver than torch does."""
    for name in ("gpu.txt", "te.txt"):
        pins = locked(name)
        release = pins["nvidia-cuda-runtime"].split(".")[:2]
        for package in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"):
            assert pins[package].split(".")[:2] == release, f"{name}: {package}"


def test_cuda_python_does_not_bring_the_files_of_cuda_bindings():
    assert int(locked("gpu.txt")["cuda-python"].split(".")[0]) >= 13


def test_no_package_overwrites_files_of_another(check):
    assert not list(check.file_problems(Path(sysconfig.get_paths()["purelib"])))


def test_an_overwritten_file_is_named(check, tmp_path):
    for package, digest in (("cuda_python-12.6", "sha256=a"), ("cuda_bindings-13.5", "sha256=b"), ("same-1", "")):
        record = tmp_path / f"{package}.dist-info" / "RECORD"
        record.parent.mkdir()
        shared = f"cuda/bindings/driver.so,{digest},1\n" if digest else ""
        record.write_text(f"{shared}cuda/__init__.py,sha256=c,0\n")
    (problem,) = check.file_problems(tmp_path)
    assert problem.startswith("files: cuda_bindings-13.5 and cuda_python-12.6 both bring 1 paths"), problem
    assert "cuda/bindings/driver.so" in problem


def test_a_package_that_does_not_import_is_named(check, tmp_path, monkeypatch):
    (tmp_path / "broken_extension.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = check.import_problems(("json", "broken_extension"))
    assert problem == "import broken_extension: ImportError: undefined symbol: _ZN3c10"


def test_a_gpu_environment_imports_the_layers_and_the_engine(check):
    assert "transformer_engine.pytorch" in check.IMPORTS["gpu"]
    assert all(any(name.startswith("vllm") for name in names) for names in check.IMPORTS.values())
