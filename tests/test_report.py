"""zerofx.report: one page that holds the records' numbers, whole and without a network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.models import GPT
from zerofx.compiler.explain import Reasons
from zerofx.compiler.listing import graph_lines
from zerofx.model.units import format_bytes
from zerofx.runtime.state.group import groups_of
from zerofx.simulate.recorder import KINDS

RATES = zerofx.Rates(1e10, 1e10, 1e8, 1e-4)
VOID = {"meta", "input", "br"}


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
        if tag not in VOID:
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
            and (cls is None or cls in (e.get("class") or "").split())
            and (within is None or within["id"] in e["inside"])
        ]


def compiled(stage: int = 3) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, dim=32, heads=2, vocab=64, length=16)
    zerofx.compile(model, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    x = torch.randint(64, (2, 16))
    model(x, x).backward()
    return model


def place(bar: dict[str, Any]) -> tuple[float, float]:
    """From where to where a bar is on the axis, in percent."""
    left, width = re.fullmatch(r"left:([\d.]+)%;width:([\d.]+)%", bar["style"]).groups()  # type: ignore[union-attr]
    return float(left), float(left) + float(width)


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
        bars = sorted(page.find("button", "gather", section) + page.find("button", "reduce", section), key=place)
        assert [(bar["data-find"].split()[1], bar["text"]) for bar in bars] == [(o.group, o.group) for o in starts]
        assert all(f"{format_bytes(o.nbytes)} received" in b["title"] for b, o in zip(bars, starts))
        zero = min(s.start for s in phase.spans)
        end = max(s.end for s in phase.spans) - zero
        travels = [s for s in phase.spans if s.operation.kind == "start"]
        for bar, span in zip(bars, travels, strict=True):
            assert place(bar) == pytest.approx(
                (100 * (span.start - zero) / end, 100 * (span.end - zero) / end), abs=1e-3
            )
        exposed = [s for s in phase.spans if s.operation.kind == "wait" and s.end > s.start]
        waits = page.find("button", "exposed", section)
        assert [place(bar)[1] for bar in waits] == pytest.approx(
            [100 * (s.end - zero) / end for s in exposed], abs=1e-3
        )
        assert len(waits) > 0
        kernels = [line for bar in page.find("button", "kernel", section) for line in bar["data-details"].splitlines()]
        assert [line.split()[2] for line in kernels] == [o.name for o in phase.operations if o.kind == "kernel"]
        for kind in KINDS:
            most = max(live[kind] for live in phase.live)
            assert [int(e["data-most"]) for e in page.find("polygon", kind, section)] == ([most] if most else [])
        corners = [point.split(",") for e in page.find("polygon", within=section) for point in e["points"].split()]
        assert min(float(y) for _, y in corners) == 0.0, "stacked, the kinds reach the top at the peak"
        for row in page.find("div", "row", section):
            places = sorted(map(place, page.find("button", within=row)))
            assert all(0 <= start < stop <= 100.001 for start, stop in places)
            assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(places)), "no two bars overlap"
        (drawing,) = page.find("svg", within=section)
        points = json.loads(drawing["data-live"])
        assert [point[1:] for point in points] == [[live[kind] for kind in KINDS] for live in phase.live]
    (table,) = page.find("table", "groups")
    groups = groups_of(model)
    assert value(page, table, "bytes") == [n for g in groups for n in (g.layout.nbytes, g.shard.nbytes)]
    for name, _ in model.named_parameters():
        assert name in table["text"]


def test_every_pass_has_its_edits_and_every_node_its_line_and_its_reason(fake_world, tmp_path: Path) -> None:
    fake_world(4)
    model = compiled()
    page = Page(zerofx.report(model, tmp_path / "out.html").read_text())
    (record,) = zerofx.graphs(model)
    for section, trace in zip(page.find("section", "graph"), record.traces(), strict=True):
        passes = {e["data-pass"]: e for e in page.find("details", "pass", section) if "data-pass" in e}
        edits = {name: page.find("span", within=e)[0]["text"] for name, e in passes.items()}
        assert edits == {name: f"{n} edit{'' if n == 1 else 's'}" for name, n in trace.edits.items()}
        assert [value(page, e, "time_s") for e in passes.values()] == [[trace.seconds[name]] for name in passes]
        (changed,) = page.find("pre", within=passes["prefetch"])
        assert changed["text"].splitlines() == trace.diff("prefetch").splitlines()[1:]
        (listing,) = page.find("pre", "listing", section)
        lines = page.find("span", within=listing)
        assert [e["text"] for e in lines] == graph_lines(trace.after("discard").graph)
        reasons = Reasons(trace)
        for line, node in zip(lines, reasons.graph.nodes, strict=True):
            tag = node.meta.get("zerofx")
            assert line.get("data-tag") == (f"{tag.kind} {tag.group}" if tag else None)
            if tag is not None:
                why = reasons.why(node)
                assert line["data-why"].splitlines() == [f"{q:<8} {a}" for q, a in why]
        assert str(trace) in section["text"]


def test_a_bar_names_the_nodes_that_it_stands_for(fake_world, tmp_path: Path) -> None:
    fake_world(4)
    for stage in (0, 2):
        page = Page(zerofx.report(compiled(stage), tmp_path / "out.html", RATES).read_text())
        for phase, graph in zip(page.find("section", "phase"), page.find("section", "graph"), strict=True):
            tags = {e["data-tag"] for e in page.find("span", within=graph) if "data-tag" in e}
            found = [e["data-find"] for e in page.find("button", within=phase) if "data-find" in e]
            assert set(found) <= tags
            assert all(e["text"] for e in page.find("button", "kernel", phase)) or (stage, phase["data-phase"]) == (
                0,
                "forward",
            )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_without_rates_the_timeline_counts_operations_in_every_stage(fake_world, tmp_path: Path, stage: int) -> None:
    fake_world(4)
    model = compiled(stage)
    page, prediction = Page(zerofx.report(model, tmp_path / "out.html").read_text()), zerofx.predict(model)
    assert not any("nan" in str(e.get("points", "")) for e in page.all)
    for section, phase in zip(page.find("section", "phase"), prediction.phases, strict=True):
        starts = sum(o.kind == "start" for o in phase.operations)
        bars = page.find("button", "gather", section) + page.find("button", "reduce", section)
        assert len(bars) == starts
        ticks = [e["text"] for e in page.find("span", "coarse", section)]
        assert ticks[0] == "0" and 5 <= len(ticks) <= 11 and int(ticks[-1]) <= len(phase.operations)
        for row in page.find("div", "row", section):
            places = sorted(map(place, page.find("button", within=row)))
            assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(places)), "no two bars overlap"
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


def test_a_dry_run_is_reported_as_the_module_would_be(fake_world, tmp_path: Path) -> None:
    options = {"stage": 3, "groups": zerofx.Grouping(min_bytes=0), "executor": "eager"}
    model, x = GPT(layers=2, dim=32, heads=2, vocab=64, length=16), torch.zeros(2, 16, dtype=torch.long)
    record = zerofx.dry_run(model, x, x, world_size=4, backend="fake", **options)
    dry = Page(zerofx.report(record, tmp_path / "dry.html", RATES).read_text())
    fake_world(4)
    real = Page(zerofx.report(compiled(), tmp_path / "real.html", RATES).read_text())

    def facts(page: Page) -> list[Any]:
        sections = page.find("section", "phase")
        bars = [(place(e), e["title"]) for section in sections for e in page.find("button", within=section)]
        numbers = [
            float(e["data-value"]) for each in (*page.find("table"), *sections) for e in page.find("data", within=each)
        ]
        return [bars, numbers]

    assert facts(dry) == facts(real)
    assert "A dry run, stage 3, 4 ranks" in dry.find("h1")[0]["text"]
    assert "executor eager" in dry.find("p")[0]["text"]


@pytest.mark.slow
def test_a_dry_run_for_a_thousand_ranks_has_a_page_without_any_of_them(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = GPT(layers=2, dim=32, heads=2, vocab=64, length=16)
    x = torch.zeros(2, 16, dtype=torch.long, device="meta")
    page = Page(
        zerofx.report(zerofx.dry_run(model, x, x, world_size=1024, backend="nccl"), tmp_path / "out.html").read_text()
    )
    assert "1024 ranks" in page.find("h1")[0]["text"]
    (table,) = page.find("table", "groups")
    whole, part = value(page, table, "bytes")[0::2], value(page, table, "bytes")[1::2]
    assert whole and whole == [1024 * n for n in part]
    assert "executor inductor, followed as the eager one would run it" in page.find("p")[0]["text"]


@pytest.mark.parametrize(
    ("time_s", "load", "said"),
    [
        (1e-9, 9.0, None),
        (1e3, 9.0, "load of 9 on 4 cores: other programs"),
        (1e3, 4.0, "what was predicted. Small operators"),
    ],
)
def test_a_step_that_took_much_longer_than_predicted_has_the_likely_cause_beside_it(
    fake_world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_s: float, load: float, said: str | None
) -> None:
    fake_world(2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    page = zerofx.report(compiled(), tmp_path / "out.html", RATES, measured={"time_s": time_s}).read_text()
    assert ("times what was predicted" in page) == (said is not None) and (said or "") in page


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page for the browser."""
    model, x = GPT(layers=2, dim=32, heads=2, vocab=64, length=16), torch.zeros(2, 16, dtype=torch.long)
    record = zerofx.dry_run(model, x, x, world_size=4, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    return zerofx.report(record, tmp_path_factory.mktemp("page") / "out.html", RATES, measured={"time_s": 0.1})


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser that runs without a window; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    arguments = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments.split())
        yield browser
        browser.close()


def test_a_person_finds_their_way_through_the_page_in_a_browser(written: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.on("request", lambda request: request.url.startswith("file:") or errors.append(request.url))
    page.goto(written.as_uri())

    # The listing: a filter that counts, and a reason for each line of zerofx's.
    graph = page.locator("section.graph").first
    lines, count = graph.locator(".listing span:visible"), graph.locator("output")
    everything = lines.count()
    assert count.inner_text() == f"{everything} nodes"
    graph.get_by_role("searchbox").fill("all_gather blocks.1")
    assert 0 < lines.count() < everything
    assert count.inner_text() == f"{lines.count()} of {everything} nodes"
    line = lines.filter(has_text="# all_gather blocks.1")
    line.click()
    assert "made by  group: One collective per group" in line.inner_text()
    line.click(position={"x": 5, "y": 5})
    assert "made by" not in line.inner_text()
    graph.get_by_role("searchbox").fill("no such node")
    assert lines.count() == 0 and count.inner_text() == f"0 of {everything} nodes"
    graph.get_by_role("searchbox").fill("")
    assert lines.count() == everything

    # A pass's changes are folded until asked for.
    changed = graph.locator("[data-pass=prefetch] pre")
    assert not changed.is_visible()
    graph.locator("[data-pass=prefetch] summary").click()
    assert changed.is_visible() and "> all_gather_into_tensor" in changed.inner_text()

    # A bar says what it stands for; a second click folds that.
    phase = page.locator("section.phase").first
    detail = phase.locator(".detail")
    assert not detail.is_visible()
    bar = phase.locator("button[data-find='all_gather blocks.1']")
    bar.click()
    assert "gather blocks.1: " in detail.inner_text() and "2 groups ahead of its use" in detail.inner_text()
    phase.locator("button.kernel").last.click()
    assert "read and written" in detail.inner_text() and "models.py:" in detail.inner_text()
    phase.locator("button.kernel").last.click()
    assert not detail.is_visible()

    # A label is whole or not shown at all; zooming in makes room.
    def shown() -> int:
        return phase.locator(".row button").evaluate_all(
            """bars => bars.filter(bar => {
                const [box, label] = [bar, bar.firstElementChild].map(each => each.getBoundingClientRect());
                if (label.top >= box.bottom) return false;
                if (label.right > box.right + 0.5) throw new Error("cut: " + bar.title);
                return true;
            }).length"""
        )

    few, width = shown(), phase.locator(".canvas").bounding_box()["width"]
    phase.get_by_role("slider").fill("5")
    assert phase.locator(".canvas").bounding_box()["width"] == pytest.approx(32 * width, rel=0.01)
    assert shown() > few
    phase.get_by_role("slider").fill("0")

    # Live bytes under the pointer add up to their sum, and go back to the peak's behind it.
    readout = phase.locator(".readout")
    at_peak = readout.inner_text()
    assert at_peak.startswith("live bytes at the peak")
    phase.locator("svg").hover(position={"x": 500, "y": 80})
    assert re.match(r"live bytes after [\d.]+ (ms|µs), [\d.]+ .?B:", readout.inner_text())
    page.mouse.move(5, 5)
    assert readout.inner_text() == at_peak
    assert errors == []


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window_and_both_colour_schemes_can_be_read(
    written: Path, chromium: Any, width: int
) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto(written.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colours.append(page.evaluate("['backgroundColor', 'color'].map(x => getComputedStyle(document.body)[x])"))
        page.close()
    for back, text in ([sum(map(int, re.findall(r"\d+", c)[:3])) / 3 for c in pair] for pair in colours):
        assert abs(back - text) > 150, colours
    assert colours[0] != colours[1]
