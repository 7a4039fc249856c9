"""Documents name files that exist, stay short, and generated pages show what the code says."""

import re
import runpy
import subprocess
from pathlib import Path

from tests.guides.documents import ALL, FENCE, GENERATED, INLINE, SHELLS, blocks
from tests.guides.documents import DOCUMENTS as GUIDES
from tests.structure import source

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"`([\w/.]+/[\w.]+\.(?:py|sh|yml|yaml|txt))`")
FRONT = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
DOCUMENTS = [*FRONT, *(path.relative_to(ROOT).as_posix() for path in GUIDES)]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))


def files_of(text: str) -> list[str]:
    return list(dict.fromkeys(FILE.findall(text)))


def test_files_that_documents_name_exist():
    missing = [
        f"{document}: {name}"
        for document in [*DOCUMENTS, "CHANGELOG.md"]
        for name in files_of((ROOT / document).read_text())
        if not any((ROOT / base / name).exists() for base in ("", "skyrl_megatron"))
    ]
    assert not missing, "\n".join(missing)


OURS = re.compile(r"``((?:skyrl_megatron\w*|bridges|benchmarks|launch|docs|tests)/[\w/.]+\.(?:py|sh|md))``")
"""A file in a docstring or comment, by its path from the root."""


def test_files_that_docstrings_name_exist():
    texts = {module: source.path_of(module).read_text() for module in source.modules()}
    named = [(module, name) for module, text in texts.items() for name in OURS.findall(text)]
    missing = [f"{module}: {name}" for module, name in named if not (ROOT / name).exists()]
    assert len(named) > 20 and not missing, "\n".join(missing)


LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """Names of the headings of a page, as GitHub and MkDocs make them."""
    lines = path.read_text().splitlines()
    titles = [re.sub(r"`|\[|\]\([^)]*\)", "", line.lstrip("# ")) for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead_links(path: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere in a checkout. Pages that launch/docs.sh writes are not there: a
    document names the command, not the page."""
    dead = []
    for link in LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if "://" in link or link.startswith("mailto:"):
            continue
        kept = target.exists() and target.resolve() not in GENERATED
        if not kept or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(f"{path.relative_to(ROOT)}: {link}")
    return dead


def test_links_lead_somewhere():
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [ROOT / name for name in tracked.splitlines() if not name.startswith("tests/")]
    assert [dead for page in pages for dead in dead_links(page, page.read_text())] == []
    assert dead_links(ROOT / "docs/index.md", "[a](faults.md) [b](concepts.md#absent) [c](concepts.md)") == [
        "docs/index.md: faults.md",
        "docs/index.md: concepts.md#absent",
    ]


def test_documents_stay_short():
    by_hand = [*FRONT, *(name for name in DOCUMENTS if name.startswith("docs/"))]
    sizes = {name: (ROOT / name).stat().st_size for name in by_hand if name != "docs/metrics.md"}
    assert sum(sizes.values()) <= 150_000, sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert sizes["ARCHITECTURE.md"] <= 12_000
    assert (ROOT / "CONFIG.md").stat().st_size <= 46_000
    assert (ROOT / "benchmarks/RESULTS.md").stat().st_size <= 24_000  # a record, in which no row gives way to another


def test_the_guide_of_plugins_names_every_registrar():
    from skyrl_megatron import plugins

    guide = (ROOT / "docs/guides/plugins.md").read_text()
    assert [name for name in vars(plugins) if name.startswith("register_") and f"`{name}" not in guide] == []


UNQUOTED = re.compile(r"(?<![\w'\"])[\w.]+=[\[{][^`'\"\n]*$")


def test_brackets_in_commands_are_quoted():
    """zsh reads ``key=[a]`` as a pattern, and fails."""
    pages = [path for path in ALL if path.name != "CONFIG.md"]
    typed = [
        (page, line) for page in pages for kind in SHELLS for b in blocks(page, kind) for line in b.text.split("\n")
    ]
    typed += [(page, line) for page in pages for line in INLINE.findall(FENCE.sub("", page.read_text()))]
    bare = [f"{page.name}: {line}" for page, line in typed if UNQUOTED.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", line))]
    assert not bare, "\n".join(bare)


def test_a_prompts_way_is_short():
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## A prompt's way")[1].split("\n## ")[0]
    way = files_of(section)
    assert 15 <= len(way) <= 20, f"{len(way)} files: {way}"


def test_decisions_are_dated_short_and_listed():
    navigation = (ROOT / "launch/site/mkdocs.yml").read_text()
    numbers = [path.name[:4] for path in DECISIONS]
    assert DECISIONS and len(set(numbers)) == len(numbers), "a number is used once; numbers of removed files stay free"
    for path in DECISIONS:
        text = path.read_text()
        assert len(text.splitlines()) <= 15, path.name
        assert re.match(r"# .+\n\n20\d\d-\d\d-\d\d\n\n\*\*Context\.\*\* ", text), path.name
        assert "\n**Decision.** " in text and "\n**Consequence.** " in text, path.name
        assert f"- decisions/{path.name}\n" in navigation, path.name


def test_generated_pages_are_made_and_not_kept():
    """``launch/docs.sh`` writes each page, and git ignores it."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    tracked = subprocess.run(["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    script = (ROOT / "launch/docs.sh").read_text()
    for page in GENERATED:
        name = page.relative_to(ROOT).as_posix()
        assert f"/{name}" in ignored and name not in tracked.splitlines(), name
        assert page.stem in script.split("docs/{")[1].split("}")[0].split(","), name


def test_the_page_of_errors(tmp_path):
    """Every topic has a section, every row a fix, and a message that is built of variables shows their values."""
    page = runpy.run_path(str(ROOT / "launch" / "site" / "errors.py"))
    page["main"]([str(tmp_path / "errors.md")])
    written = (tmp_path / "errors.md").read_text()
    assert [line[3:] for line in written.splitlines() if line.startswith("## ")] == [
        t["title"] for t in page["TOPICS"]
    ]
    rows = [line for line in written.splitlines() if line.startswith("| ") and line != "| message | fix |"]
    assert len(rows) > 300 and all(re.fullmatch(r"\| .+ \| .+ \|", row) for row in rows)
    assert "| set kv_cache_bytes |" in written
    assert "one at a time while the policy trains: set it to false" in written, "a variable's value"
