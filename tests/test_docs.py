"""README.md and docs/ hold what they say: links lead somewhere, code runs, tables are those of benchmarks/results."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests import pages
from tests.pages import PAGES, ROOT, blocks
from tests.workers import Workers
from zerofx import passes


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo asks for it
    spec.loader.exec_module(module)
    return module


hooks = load("docs/hooks.py")
RUN = [page for page in PAGES if any(not block.fragment for block in blocks(page))]


def anchors(page: Path) -> set[str]:
    """What a heading is called in an address, as GitHub and the site's slugs have it."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", page.read_text(), flags=re.M | re.S)
    headings = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", found) for found in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for _, _, target in hooks.links_of(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target} is not there"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}: no such heading; there are {sorted(anchors(path))}"


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert menu == {page.name for page in PAGES if page.parent == ROOT / "docs"} | {"index.md", "contributing.md"}


@pytest.mark.parametrize("name", ["zerofx", "passes", "kernels", "tests", "examples", "benchmarks"])
def test_pages_that_code_refers_to_are_there(name: str) -> None:
    for file in sorted((ROOT / name).rglob("*.py")):
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text()):
            found = (ROOT / page).exists()
            assert found, f"{file.relative_to(ROOT)} refers to {page}"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(workers2: Workers, page: Path, tmp_path: Path) -> None:
    ran = workers2.run(pages.run_page, page, str(tmp_path))
    assert ran == [sum(not block.fragment for block in blocks(page))] * 2


def test_the_program_of_the_first_page_runs_under_torchrun(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "start.md").read_text()
    (program,) = (block.code for block in blocks(ROOT / "docs" / "start.md") if "init_process_group" in block.code)
    assert program.count("stage=3)") == 1
    (tmp_path / "train.py").write_text(program.replace("stage=3)", 'stage=3, executor="eager")'))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    shapes = re.findall(r"rank \d: .*? are here", text)
    assert len(shapes) == 2 and all(each in done.stdout for each in shapes), done.stdout
    head = re.findall(r"^forward: .*$", text, re.M)
    assert len(head) == 1 and head[0] in done.stdout, done.stdout


def test_a_block_that_fails_is_found_with_its_line(workers2: Workers, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n<!-- goes on -->\n```python\n\nassert x == 2\n```\n")
    with pytest.raises(AssertionError, match=r'page\.md", line 10'):
        workers2.run(pages.run_page, page, str(tmp_path))
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        workers2.run(pages.run_page, page, str(tmp_path))


def test_comments_in_front_of_blocks_are_ones_that_are_known() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert re.fullmatch(r"|goes on|given: compiled|fragment: .{8,}", block.said), (page.name, block.line)
        commented = re.findall(r"^<!-- (?:goes on|given: .*|fragment: .*) -->\n(?!```python)", page.read_text(), re.M)
        assert not commented, f"{page.name}: no python block behind {commented}"


def test_listings_of_graphs_are_real(tmp_path: Path) -> None:
    """docs/stages.md has those of `Tiny`, README.md the first lines of examples/gpt.py's."""
    page = ROOT / "docs" / "stages.md"
    (code,) = (block.code for block in blocks(page) if "class Tiny" in block.code)
    (tmp_path / "tiny.py").write_text(f"import torch.nn.functional as F\nfrom torch import nn\n\n{code}")
    example = load("examples/gpt.py")
    with torch.device("meta"):
        tiny, x = load(str(tmp_path / "tiny.py")).Tiny(), torch.zeros(8, 512)
        gpt, tokens = example.GPT(8, 128, 4, 128), torch.zeros(8, 128, dtype=torch.long)

    def listing(model: nn.Module, batch: torch.Tensor, stage: int) -> str:
        return str(zerofx.dry_run(model, batch, world_size=2, backend="gloo", executor="eager", stage=stage))

    def plain(text: str) -> str:
        """Without places and the width of columns; what is cut off at the end of a line does not count."""
        text = re.sub(r"\S+\.py:\d+", "", text)
        return "\n".join(re.sub(r"\s+", " ", line).strip().removesuffix("…")[:40] for line in text.splitlines())

    for stage in (0, 2, 3):
        assert plain(listing(tiny, x, stage)) in plain(page.read_text()), f"stage {stage}"
    printed = re.search(r"^forward: 10 all-gathers.*?(?=^ +\.\.\.$)", (ROOT / "README.md").read_text(), re.M | re.S)
    assert printed and plain(listing(gpt, tokens, 3)).startswith(plain(printed[0]).rstrip()), printed


def test_tables_of_results_are_those_of_the_files() -> None:
    results = load("docs/pictures/results.py")
    text = {page: (ROOT / page).read_text() for page in ("README.md", "docs/benchmarks.md")}
    for make in results.TABLES:
        page = "README.md" if make is results.readme else "docs/benchmarks.md"
        assert make() in text[page], f"{page}: the table of {make.__name__} is not that of benchmarks/results"


def test_the_tour_of_the_code_can_be_read_in_a_sitting() -> None:
    page = ROOT / "docs" / "code-tour.md"
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (\d+) \| .+\? \|$", page.read_text(), re.M)
    found = {name: len((page.parent / name).read_text().splitlines()) for name, _ in rows}
    assert 10 <= len(rows) <= 15 and sum(found.values()) <= 3000, found
    off = {name: found[name] for name, said in rows if abs(found[name] - int(said)) > 20}
    assert not off, f"docs/code-tour.md has another number of lines for {off}"


def test_the_passes_and_rules_of_the_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "passes.md").read_text()
    table = re.findall(r"^\| \[(\w+)\] \|", page, re.M)
    pipeline = [pass_.__name__ for pass_ in passes.PIPELINE]
    core = [pass_.__name__ for pass_ in passes.PIPELINE if pass_.__module__.startswith("zerofx.passes.")]
    optional = [name for name in pipeline if name not in core]
    for names in (core, optional):
        assert [name for name in table if name in names] == names
    assert set(table) == {*pipeline, *(pass_.__name__ for pass_ in passes.REPLICATED)}
    kinds = page[page.index("| pass | kinds |") : page.index("After every pass")]
    inserts = re.findall(r"^\| (\w+)(?:, \w+)? \| ", kinds, re.M)
    assert set(inserts) - {"pass"} == set(table)
    rules = re.findall(r"^\| (\w+) \| ", page[page.index("| rule |") : page.index("The last rule")], re.M)
    described = (passes.verify.__globals__["__doc__"]).rpartition("===========")[0]
    assert set(rules) == set(re.findall(r"^(\w+) {2,}\S", described, re.M))


def test_the_readme_counts_the_passes() -> None:
    """Those of every model in stage 3; `save_parameters` and `all_reduce` are of stage 0."""
    own = [pass_ for pass_ in passes.PIPELINE if pass_.__module__.startswith("zerofx.passes.")]
    words = {9: "Nine", 10: "Ten", 11: "Eleven", 12: "Twelve"}
    assert f"\n{words[len(own)]} passes do this" in (ROOT / "README.md").read_text()


def _arguments(of: Any) -> list[str]:
    return list(inspect.signature(of).parameters)


def test_the_guides_name_every_option_of_the_programs_one_comes_from() -> None:
    """Of the torch that is installed: a new version may bring new ones."""
    text = {name: (ROOT / "docs" / f"from-{name}.md").read_text() for name in ("fsdp2", "ddp")}
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    asked = {
        "fsdp2": [*_arguments(fully_shard), *_arguments(MixedPrecisionPolicy), *methods],
        "ddp": _arguments(DistributedDataParallel),
    }
    for guide, names in asked.items():
        missing = [name for name in names if not re.search(rf"`{name}\b", text[guide])]
        assert len(names) > 15 and not missing, f"docs/from-{guide}.md says nothing of {missing}"


def test_the_readme_is_short_and_its_tables_are_narrow() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert max(line.count("|") for line in lines if line.startswith("|")) <= 7  # six columns


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr


def test_every_drawing_follows_the_theme_of_the_page() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"\]\(([^)\s]+\.svg)\)", page.read_text())
    }
    assert len(shown) > 10
    assert not [path.name for path in sorted(shown) if "prefers-color-scheme: dark" not in path.read_text()]
