"""MkDocs hook: documents outside docs/ become pages, and links to files of the repository lead to them.

Source files that a document links to are shown as pages too, so that every link stays within the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "launch/examples/README.md": "examples.md",
    "CONFIG.md": "options.md",
    "benchmarks/RESULTS.md": "project/results.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
}
"""File of the repository → page."""
LINKS_ONLY = ("README.md", "CONFIG.md")
"""Files that are no pages themselves: docs/ has the page that links to them lead to."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
OPTIONS = re.compile(r"^(```+\w+) [^\n]*$", re.MULTILINE)
"""Options for the tests, after the language of a block."""
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sbatch": "bash"}


def on_files(files: Any, config: Any) -> Any:
    """Add the documents outside docs/, and the source files that documents link to."""
    for path, page in PAGES.items():
        if path not in LINKS_ONLY:
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    documents = {f"docs/{file.src_uri}": file.content_string for file in files if file.src_uri.endswith(".md")}
    for document, text in documents.items():
        for _, target, _ in LINK.findall(text):
            path = repository_path(page_path(document.removeprefix("docs/")), target)
            if (ROOT / path).is_file() and site_path(path).startswith("source/"):
                if files.get_file_from_path(site_path(path)) is None:
                    files.append(File.generated(config, site_path(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri

    def turned(found: re.Match[str]) -> str:
        path = repository_path(page_path(here), found[2])
        if not (ROOT / path).exists():
            return found[0]
        return found[1] + posixpath.relpath(site_path(path), posixpath.dirname(here) or ".") + found[3]

    return OPTIONS.sub(r"\1", LINK.sub(turned, markdown))


def page_path(page: str) -> str:
    """Return which file of the repository a page is made of."""
    return next((path for path, name in PAGES.items() if name == page and path not in LINKS_ONLY), f"docs/{page}")


def repository_path(document: str, target: str) -> str:
    """Return what a document links to, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), target))


def site_path(path: str) -> str:
    """Return the page of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def shown(path: str) -> str:
    """Return a page with the text of a source file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n````{language}\n{(ROOT / path).read_text()}````\n"
