"""The documents name files that are there, and the way of a prompt stays short."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"`([\w/.]+/[\w.]+\.(?:py|sh|yml|yaml|txt))`")


def files_of(text: str) -> list[str]:
    return list(dict.fromkeys(FILE.findall(text)))


DOCUMENTS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "CHANGELOG.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_files_that_documents_name_exist():
    missing = [
        f"{document}: {name}"
        for document in DOCUMENTS
        for name in files_of((ROOT / document).read_text())
        if not any((ROOT / base / name).exists() for base in ("", "skyrl_megatron"))
    ]
    assert not missing, "\n".join(missing)


def test_the_page_of_errors_is_that_of_the_code():
    page = runpy.run_path(str(ROOT / "launch" / "site" / "errors.py"))
    written = page["PAGE"].read_text()
    assert written == page["page"](), "run: python launch/site/errors.py"
    assert "prompts are sampled one by one while the policy trains: set it to false" in written, "a variable's value"
    assert "| set kv_cache_bytes |" in written


def test_a_prompts_way_is_short():
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## A prompt's way")[1].split("\n## ")[0]
    way = files_of(section)
    assert 25 <= len(way) <= 35, f"{len(way)} files: {way}"
