"""What makes these pages a site: hooks for MkDocs. The pages themselves are plain Markdown, as GitHub shows it.

* README.md is the front page, and CONTRIBUTING.md is a page, too.
* A link to a file outside of docs/ (`../passes/gather.py`) leads to a page that shows the file.

tests/test_docs.py reads links by `links_of`, and needs no MkDocs for it.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # pages that live beside docs/
SHOWN = {".py": "python", ".sh": "bash", ".toml": "toml", ".md": "markdown", "": "text"}
_FENCE = re.compile(r"^(?P<mark>`{3,}|~{3,}).*?^(?P=mark)\s*$", re.M | re.S)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
_LINK = re.compile(r"(?<=\]\()(?P<inline>[^()\s]+)(?=\))|^(?<=\[)?\[[^\]\n]+\]:\s+(?P<named>\S+)", re.M)


def without_code(markdown: str) -> str:
    """``markdown`` with all code blanked out, character by character."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    # A link's text may be code: `[`x`](y)` keeps its target.
    return _CODE.sub(blank, _FENCE.sub(blank, markdown))


def links_of(markdown: str) -> Iterator[tuple[int, int, str]]:
    """Where each link's target begins and ends, and the target."""
    for found in _LINK.finditer(without_code(markdown)):
        name = "inline" if found["inline"] else "named"
        yield found.start(name), found.end(name), found[name]


def replace_links(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with each link's target changed."""
    parts, last = [], 0
    for begin, end, target in links_of(markdown):
        parts += [markdown[last:begin], change(target)]
        last = end
    return "".join([*parts, markdown[last:]])


def outside(target: str, here: str = "") -> Path | None:
    """The file or folder of this repository, outside of docs/, to which a link of a page in docs/``here`` leads."""
    if re.match(r"[a-z]+:|#|/", target):
        return None
    path = Path(os.path.normpath(DOCS / here / target.partition("#")[0]))
    return path if path.exists() and DOCS not in (path, *path.parents) else None


def page_of(path: Path) -> str:
    """The address, below docs/, of what shows ``path``."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    name = f"source/{name}"
    return f"{name}.md" if path.is_dir() or path.suffix in SHOWN else name


def moved(name: str) -> str:
    """One of `PAGES`, as if it were in docs/."""

    def change(target: str) -> str:
        if re.match(r"[a-z]+:|#", target):
            return target
        return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"

    return replace_links((ROOT / name).read_text(), change)


def on_files(files: Any, config: Any) -> Any:
    """Add `PAGES`, and a page for each file that a page links to."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=moved(name)))
    waiting: list[Path | None] = []
    done = {ROOT / name for name in PAGES}
    for file in files.documentation_pages():
        here = posixpath.dirname(file.src_uri)
        waiting += [outside(target, here) for _, _, target in links_of(file.content_string)]
    while waiting:
        path = waiting.pop()
        if path is None or path in done:
            continue
        done.add(path)
        if path.is_dir():
            waiting += [each for each in sorted(path.iterdir()) if _is_source(each)]
        files.append(File.generated(config, page_of(path), **_content(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links out of docs/ to the pages of `on_files`."""
    here = posixpath.dirname(page.file.src_uri)
    if here.startswith("source"):
        return markdown

    def change(target: str) -> str:
        path = outside(target, here)
        return target if path is None else posixpath.relpath(page_of(path), here)

    return replace_links(markdown, change)


def _is_source(path: Path) -> bool:
    return path.is_file() and path.suffix in (".py", ".json") and not path.is_symlink()


def _content(path: Path) -> dict[str, Any]:
    """What `File.generated` takes for ``path``."""
    head = f"---\nsearch:\n  exclude: true\n---\n# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        inside = [each for each in sorted(path.iterdir()) if _is_source(each)]
        names = {each: posixpath.relpath(page_of(each), posixpath.dirname(page_of(path))) for each in inside}
        return {"content": head + "".join(f"* [{each.name}]({name})\n" for each, name in names.items())}
    if path.suffix in SHOWN:
        return {"content": f"{head}{'`' * 8}{SHOWN[path.suffix]}\n{path.read_text()}\n{'`' * 8}\n"}
    return {"abs_src_path": str(path)}
