"""The picture of docs/reading.md: the charts of a report, as a browser shows them.

    make pictures

Writes step.png and step-dark.png beside itself: a training step of a GPT of 6 layers, d = 1024, on 8 ranks in stage 3.
By `zerofx.dry_run`, so that nothing but a browser is needed; the rates are round ones of a GPU on a fast link.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import zerofx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.models import GPT  # noqa: E402

RATES = zerofx.Rates(flops_per_s=1e14, memory_bytes_per_s=2e12, link_bytes_per_s=1.5e11, link_latency_s=2e-5)
MARGIN = 12


def main() -> None:
    with torch.device("meta"):
        model = GPT(layers=6, dim=1024, heads=16, vocab=8192, length=1024)
    batch = torch.zeros(2, 1024, dtype=torch.long, device="meta")
    record = zerofx.dry_run(model, batch, batch, world_size=8, backend="nccl", executor="eager")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = zerofx.report(record, Path(folder) / "report.html", RATES)
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            page = window.new_page(
                viewport={"width": 1000, "height": 900},
                color_scheme=scheme,  # type: ignore[arg-type]
                device_scale_factor=1.5,
            )
            page.goto(path.as_uri())
            page.locator(".zoom").evaluate_all("all => all.forEach(each => { each.style.visibility = 'hidden'; })")
            boxes = [page.locator("section.phase").nth(i).bounding_box() for i in (0, 1)]
            top, bottom = boxes[0]["y"] - MARGIN, boxes[1]["y"] + boxes[1]["height"] + MARGIN
            clip = {"x": 24 - MARGIN, "y": top, "width": 952 + 2 * MARGIN, "height": bottom - top}
            page.screenshot(path=HERE / f"step{suffix}.png", full_page=True, clip=clip)


if __name__ == "__main__":
    main()
