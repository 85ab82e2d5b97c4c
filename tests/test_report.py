"""zerofx.report: one page that holds the records' numbers, whole and without a network."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.models import GPT
from zerofx.listing import graph_lines
from zerofx.rehearsal import KINDS
from zerofx.shard import groups_of

RATES = zerofx.Rates(1e10, 1e10, 1e8, 1e-4)
VOID = {"meta", "input", "br", "rect", "polygon"}


class Page(HTMLParser):
    """All elements as (tag, attributes, text inside), and an error where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[dict[str, Any]] = []
        self.all: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {[e['tag'] for e in self.open]}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = {"tag": tag, "text": "", "inside": [e["id"] for e in self.open], "id": len(self.all), **dict(attrs)}
        self.all.append(element)
        if tag not in ("meta", "input", "br"):
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def find(self, tag: str, cls: str | None = None, within: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return [
            e
            for e in self.all
            if e["tag"] == tag
            and (cls is None or e.get("class") == cls)
            and (within is None or within["id"] in e["inside"])
        ]


def compiled(stage: int = 3) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, dim=32, heads=2, vocab=64, length=16)
    zerofx.compile(model, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    x = torch.randint(64, (2, 16))
    model(x, x).backward()
    return model


def value(page: Page, within: dict[str, Any], name: str) -> list[float]:
    return [float(e["data-value"]) for e in page.find("data", name, within)]


def test_numbers_in_the_page_are_those_of_the_prediction_the_groups_and_the_records(fake_world, tmp_path: Path) -> None:
    fake_world(4)
    model = compiled()
    path = zerofx.report(model, tmp_path / "out.html", RATES, measured={"wire_bytes": 1e6, "time_s": 0.5})
    page, prediction = Page(path.read_text()), zerofx.predict(model, RATES)
    (step,) = page.find("table", "step")
    for name, real in (("time_s", [0.5]), ("exposed_s", []), ("wire_bytes", [1e6]), ("peak_bytes", [])):
        assert value(page, step, name) == [prediction.summary()[name], *real]
    assert f"{100 * (prediction.wire_bytes / 1e6 - 1):+.1f} %" in step["text"]
    phases = page.find("section", "phase")
    assert [e["data-phase"] for e in phases] == ["forward", "backward"]
    for section, phase in zip(phases, prediction.phases, strict=True):
        assert value(page, section, "wire_bytes") == [phase.wire_bytes]
        assert value(page, section, "peak_bytes") == [sum(phase.peak.values())]
        assert value(page, section, "time_s") == [phase.time_s] and value(page, section, "exposed_s") == [
            phase.exposed_s
        ]
        starts = [o for o in phase.operations if o.kind == "start"]
        bars = page.find("rect", "gather", section) + page.find("rect", "reduce", section)
        assert len(bars) == len(starts)
        exposed = [s for s in phase.spans if s.operation.kind == "wait" and s.end > s.start]
        assert len(page.find("rect", "exposed", section)) == len(exposed) > 0
        for kind in KINDS:
            most = max(live[kind] for live in phase.live)
            assert [int(e["data-most"]) for e in page.find("polygon", kind, section)] == ([most] if most else [])
        corners = [point.split(",") for e in page.find("polygon", within=section) for point in e["points"].split()]
        assert min(float(y) for _, y in corners) == 16.0, "stacked, the kinds reach the top at the peak"
        for bar in page.find("rect", within=section):
            assert float(bar["x"]) >= 0 and float(bar["x"]) + float(bar["width"]) <= 1000.6
    (table,) = page.find("table", "groups")
    groups = groups_of(model)
    assert value(page, table, "bytes") == [n for g in groups for n in (g.layout.nbytes, g.shard.nbytes)]
    for name, _ in model.named_parameters():
        assert name in table["text"]


def test_every_pass_has_its_edits_and_every_node_its_line(fake_world, tmp_path: Path) -> None:
    fake_world(4)
    model = compiled()
    page = Page(zerofx.report(model, tmp_path / "out.html").read_text())
    (record,) = zerofx.graphs(model)
    for section, trace in zip(page.find("section", "graph"), record.traces(), strict=True):
        (table,) = page.find("table", "passes", section)
        cells = [e["text"] for e in page.find("td", within=table)]
        assert dict(zip(cells[0::4], map(int, cells[1::4]), strict=True)) == trace.edits
        changed = dict(zip(cells[0::4], cells[3::4], strict=True))
        moved = trace.diff("prefetch").splitlines()[1:]
        assert changed["prefetch"] == "what" + "\n".join(moved)
        (listing,) = page.find("pre", "listing", section)
        assert [e["text"] for e in page.find("span", within=listing)] == graph_lines(trace.after("discard").graph)
        assert str(trace) in section["text"]


@pytest.mark.parametrize("stage", [0, 2])
def test_without_rates_the_timeline_counts_operations_in_every_stage(fake_world, tmp_path: Path, stage: int) -> None:
    fake_world(4)
    model = compiled(stage)
    page, prediction = Page(zerofx.report(model, tmp_path / "out.html").read_text()), zerofx.predict(model)
    assert not any("nan" in str(e.get("points", "")) for e in page.all)
    for section, phase in zip(page.find("section", "phase"), prediction.phases, strict=True):
        starts = sum(o.kind == "start" for o in phase.operations)
        assert len(page.find("rect", "gather", section) + page.find("rect", "reduce", section)) == starts
        assert value(page, section, "time_s") == []


def test_the_page_needs_no_network_and_shows_names_as_they_are(fake_world, tmp_path: Path) -> None:
    fake_world(2)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict({"<b>&$x": torch.nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["<b>&$x"](x).sum()

    model = zerofx.compile(Odd(), executor="eager")
    model(torch.ones(2, 4)).backward()
    text = zerofx.report(model, tmp_path / "out.html").read_text()
    page = Page(text)
    assert not re.search(r"https?://|\bsrc=|@import|<link", text)
    assert page.find("b") == []
    assert any("layers.<b>&$x.weight" in e["text"] for e in page.find("table", "groups"))


def test_what_cannot_be_reported_is_refused(fake_world, tmp_path: Path) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match="Linear is not sharded"):
        zerofx.report(torch.nn.Linear(2, 2), tmp_path / "out.html")
    model = zerofx.compile(torch.nn.Linear(2, 2), executor="eager")
    with pytest.raises(RuntimeError, match="nothing was compiled for training yet"):
        zerofx.report(model, tmp_path / "out.html")
    with pytest.raises(ValueError, match="measured='speed': expected some of 'time_s'"):
        zerofx.report(model, tmp_path / "out.html", measured={"speed": 1.0})
    assert not (tmp_path / "out.html").exists()


def test_a_browser_filters_the_listing(fake_world, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    fake_world(4)
    path = zerofx.report(compiled(), tmp_path / "out.html", RATES)
    with api.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser).new_page()
        errors: list[Any] = []
        page.on("pageerror", errors.append)
        page.goto(path.as_uri())
        section = page.locator("section.graph").first
        lines = section.locator(".listing span:visible")
        everything = lines.count()
        section.locator("input").fill("all_gather blocks.1")
        assert 0 < lines.count() < everything
        assert "all_gather_into_tensor" in lines.first.inner_text()
        section.locator("input").fill("")
        assert lines.count() == everything
        assert errors == []
