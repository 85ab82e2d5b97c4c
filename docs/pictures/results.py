"""The tables of docs/benchmarks.md, and its figures, from benchmarks/results.

    python docs/pictures/results.py            # draws the figures beside itself (needs matplotlib)
    python docs/pictures/results.py --tables   # prints the tables

A test compares the tables with the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
RUNS = [("gpt", "GPT"), ("wide", "wide"), ("deep", "deep"), ("embedding", "embedding")]
LINKS = {"250mbit": "250 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
PEERS = {"zerofx": "zerofx stage 3", "fsdp2+prefetch": "FSDP2", "deepspeed-3": "DeepSpeed ZeRO-3"}
PEERS |= {"zerofx-2": "zerofx stage 2", "ddp": "DDP"}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def seconds(contenders: dict[str, Any], name: str) -> str:
    return f"{contenders[name]['median_s']:.2f} s" if name in contenders else ""


def bound(run: dict[str, Any], name: str) -> float:
    """What no schedule can beat: arithmetic alone, or the step's bytes on the wire."""
    contenders = run["contenders"]
    wire = contenders[name]["wire_bytes_per_step"] / run["link_bytes_per_s"]
    return max(contenders["alone"]["median_s"], wire)


def links() -> str:
    """Two hosts: seconds of a step."""
    rows, runs = [], read("two_hosts")["runs"]
    for rate, said in LINKS.items():
        for key, name in RUNS:
            if run := runs.get(f"{key} at {rate}"):
                rows.append([f"{name}, {said}", *(seconds(run["contenders"], peer) for peer in PEERS)])
    return table(["model, link", *PEERS.values()], rows)


def one_host() -> str:
    names = {"alone": "alone", "zerofx-3-one-copy": "zerofx, one copy", "zerofx": "zerofx stage 3", "fsdp2": "FSDP2"}
    names |= {"zerofx-2": "zerofx stage 2", "ddp": "DDP"}
    runs = read("two_hosts")["runs"]
    rows = [[name, *(seconds(runs[f"{key} at loopback"]["contenders"], n) for n in names)] for key, name in RUNS]
    return table(["model", *names.values()], rows)


def compiled() -> str:
    """Beside compiled peers, with least and most."""
    names = {"alone": "arithmetic alone", "zerofx": "zerofx stage 3", "fsdp2+prefetch": "FSDP2"}
    names |= {"fsdp2+compile+prefetch": "FSDP2, compiled", "zerofx-2": "zerofx stage 2", "ddp": "DDP"}
    names |= {"ddp+compile": "DDP, compiled"}
    rows, runs = [], read("two_hosts-compiled")["runs"]
    for rate, said in {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "loopback": "one host"}.items():
        found = runs[f"gpt at {rate}"]["contenders"]
        spread = {name: f"({found[name]['min_s']:.2f}, {found[name]['max_s']:.2f})" for name in names}
        rows.append([said, *(f"{seconds(found, name)} {spread[name]}" for name in names)])
    found = runs["gpt at loopback"]["contenders"]
    rows.append(["peak of a step, one host", *(f"{found[name]['peak_bytes'] / 1e6:.0f} MB" for name in names)])
    return table(["GPT, link", *names.values()], rows)


def stages() -> str:
    names = {"zerofx-0": "zerofx stage 0", "zerofx-1": "zerofx stage 1", "zerofx-2": "zerofx stage 2", "ddp": "DDP"}
    names |= {"deepspeed-1": "DeepSpeed stage 1", "deepspeed-2": "DeepSpeed stage 2"}
    found = read("stages-cpu-2")["contenders"]
    rows = [[said, seconds(found, n), f"{found[n]['wire_bytes_per_step'] / 1e6:.0f} MB"] for n, said in names.items()]
    return table(["", "step", "sent per rank"], rows)


def peaks() -> str:
    rows, runs = [], read("two_hosts")["runs"]
    for key, name in RUNS:
        found = runs[f"{key} at 1gbit"]["contenders"]
        rows.append([name, *(f"{found[peer]['peak_bytes'] / 1e6:.0f} MB" for peer in PEERS)])
    return table(["model", *PEERS.values()], rows)


def budgets() -> str:
    run = read("two_hosts-budgets")["runs"]["gpt at 1gbit"]["contenders"]
    rows = []
    for name, found in run.items():
        predicted = found["predicted"]
        rows.append(
            [
                f"{name.removeprefix('zerofx-3-').removesuffix('MB')} MB",
                f"{found['median_s']:.2f} s",
                f"{predicted['time_s']:.2f} s",
                f"{found['wire_bytes_per_step'] / 1e6:.0f} MB",
                f"{found['peak_bytes'] / 1e6:.0f} MB",
            ]
        )
    return table(["`memory_budget`", "measured", "predicted", "received", "peak"], rows)


OPTIMIZERS = {
    "copy": "copy of as many elements",
    "fused kernel": "`torch._fused_adamw_`, one flat tensor, unclipped",
    "torch fused unclipped": "torch.optim.AdamW(fused=True), unclipped",
    "zerofx unclipped": "zerofx.AdamW, unclipped",
    "zerofx": "**zerofx.AdamW**",
    "torch fused": "torch.optim.AdamW(fused=True)",
    "zerofx bf16": "zerofx.AdamW, bfloat16 weights",
    "fsdp2 fused": "FSDP2, AdamW(fused=True) on DTensors",
    "zerofx bf16 split": "zerofx.AdamW, bfloat16 weights, split masters",
    "zerofx 8-bit": "zerofx.AdamW, 8-bit moments",
    "torch foreach unclipped": "torch.optim.AdamW(foreach=True), unclipped",
    "torch foreach": "torch.optim.AdamW(foreach=True)",
    "fsdp2": "FSDP2, AdamW on DTensors (its default)",
    "bitsandbytes 8-bit": "bitsandbytes AdamW8bit",
}


def optimizers() -> str:
    found = read("optimizer-cpu-2")["contenders"]
    rows = []
    for name, said in OPTIMIZERS.items():
        row = found[name]
        ratio = row["times_as_long_as"]["zerofx"]
        per_s = row["gb_per_s_and_rank"]
        rows.append(
            [said, f"{row['median_s'] * 1e3:.0f} ms", f"{ratio:.2f}", f"{row['bytes_per_parameter']}", f"{per_s:.1f}"]
        )
    return table(["", "step", "× zerofx", "bytes per parameter", "GB/s and rank"], rows)


def compiling() -> str:
    rows = []
    for found in read("compile_time")["share"].values():
        whole = f"{found['parameters'] / 1e6:.0f} million"
        times = [f"{found[key]:.1f} s" for key in ("zerofx_s", "torch_compile_s")]
        rows.append([f"GPT, {found['layers']} layers", whole, *times, f"{found['share'] * 100:.0f} %"])
    return table(["model", "parameters", "zerofx's passes", "`torch.compile`", "share"], rows)


def checkpoints() -> str:
    found = read("checkpoint-cpu-2")["contenders"]
    what = {
        "save": "save",
        "load": "load; zerofx verifies checksums, FSDP2 has none",
        "stops": "training stands still for a save in the background",
    }
    pairs = {said: [found[who][key]["median_s"] for who in ("zerofx", "fsdp2")] for key, said in what.items()}
    rows = [[said, *(f"{each:.2f} s" for each in pair)] for said, pair in pairs.items()]
    return table(["", "zerofx", "FSDP2 with torch.distributed.checkpoint"], rows)


def whole_weights() -> str:
    one_host, link = (read(f"full_parameters-{where}")["contenders"] for where in ("cpu", "1gbit"))
    said = {
        "zerofx": "`zerofx.full_parameters`",
        "zerofx bf16": "the same in bf16",
        "zerofx rank 0": "the same to rank 0 alone",
        "zerofx full_state_dict": "`zerofx.full_state_dict`",
        "fsdp2 full_tensor": "FSDP2, `full_tensor()` of each weight",
        "fsdp2 full_tensor bf16": "the same in bf16",
        "fsdp2 state dict": "FSDP2, `get_model_state_dict`, whole",
    }
    rows = []
    for name, what in said.items():
        cells = [what]
        for row in (one_host[name], link[name]):
            times = [f"{row[key] * 1e3:.0f}" for key in ("median_s", "min_s", "max_s")]
            cells += [f"{times[0]} ms ({times[1]} to {times[2]})", f"{row['times_as_long_as_zerofx']:.2f}"]
        rows.append([*cells, f"{link[name]['times_as_long_as_the_wire']:.2f}"])
    return table(["", "one host", "× zerofx", "at 1 Gbit/s", "× zerofx", "× its bytes on the wire"], rows)


def readme() -> str:
    """The README's results."""
    command = "benchmarks/two_hosts.py --models {} --rates {}"
    whole = {"fsdp2+prefetch": "FSDP2", "fsdp2+compile+prefetch": "FSDP2, compiled"}
    replicas, deepspeed = {"ddp": "DDP", "ddp+compile": "DDP, compiled"}, {"deepspeed-3": "DeepSpeed ZeRO-3"}
    steps = [
        ("step, stage 3, two hosts at 1 Gbit/s", "two_hosts-compiled", "gpt", "1gbit", "zerofx", whole),
        ("the same in another run", "two_hosts", "gpt", "1gbit", "zerofx", deepspeed),
        ("a large embedding, `lookups=True`", "two_hosts", "embedding", "1gbit", "zerofx-3-lookups", deepspeed),
        ("step, stage 3, two hosts at 10 Gbit/s", "two_hosts-compiled", "gpt", "10gbit", "zerofx", whole),
        ("step, stage 3, one host", "two_hosts-compiled", "gpt", "loopback", "zerofx", whole),
        ("step, stage 2, two hosts at 1 Gbit/s", "two_hosts-compiled", "gpt", "1gbit", "zerofx-2", replicas),
        ("step, stage 2, two hosts at 10 Gbit/s", "two_hosts-compiled", "gpt", "10gbit", "zerofx-2", replicas),
        ("step, stage 2, one host", "two_hosts-compiled", "gpt", "loopback", "zerofx-2", replicas),
    ]
    rows = []
    for what, file, model, rate, ours, peers in steps:
        found = read(file)["runs"][f"{model} at {rate}"]["contenders"]
        best = min(peers, key=lambda name: found[name]["median_s"])
        a, b = found[ours]["median_s"], found[best]["median_s"]
        said = f"{peers[best]}: {b:.2f} s"
        rows.append([what, f"{a:.2f} s", said, f"{b / a:.2f}", f"`{command.format(model, rate)}`"])
    found = read("two_hosts-compiled")["runs"]["gpt at loopback"]["contenders"]
    best = min(whole, key=lambda name: found[name]["peak_bytes"])
    a, b = (found[name]["peak_bytes"] / 1e6 for name in ("zerofx", best))
    said = f"{whole[best]}: {b:.0f} MB"
    rows.append(["peak memory, stage 3, one host", f"{a:.0f} MB", said, f"{b / a:.2f}", "the same"])
    found = read("optimizer-cpu-2")["contenders"]
    a, b = (found[name]["median_s"] * 1e3 for name in ("zerofx", "torch fused"))
    ratio = found["torch fused"]["times_as_long_as"]["zerofx"]
    peer = f"torch.optim, fused: {b:.0f} ms"
    rows.append(["AdamW with clipping", f"{a:.0f} ms", peer, f"{ratio:.2f}", "`benchmarks/optimizer.py`"])
    found = read("checkpoint-cpu-2")["contenders"]
    a, b = (found[name]["save"]["median_s"] for name in ("zerofx", "fsdp2"))
    rows.append(["saving 1 GB", f"{a:.2f} s", f"FSDP2: {b:.2f} s", f"{b / a:.2f}", "`benchmarks/checkpoint.py`"])
    return table(["what", "zerofx", "best peer", "ratio", "command: `python ...`"], rows)


TABLES = [readme, links, compiled, one_host, stages, peaks, budgets, optimizers, compiling, checkpoints, whole_weights]
# Colours of matplotlib that stand for those of `drawing.COLOURS`, so that a figure follows the page's theme.
HUES = {"zerofx": "#0000f1", "FSDP2": "#0000f2", "DeepSpeed": "#0000f3", "DDP": "#0000f4", "other": "#0000f5"}


def figures() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "zerofx", "font.family": "sans-serif"}
    matplotlib.rcParams |= {"font.size": 10, "axes.edgecolor": "#0000e1", "text.color": "#0000e2"}
    matplotlib.rcParams |= {"xtick.color": "#0000e2", "ytick.color": "#0000e2", "axes.labelcolor": "#0000e2"}
    runs = read("two_hosts")["runs"]
    at = {name: runs[f"{key} at 1gbit"] for key, name in RUNS}
    bars("links", "a step at 1 Gbit/s, seconds; the line: what no schedule can beat", at, list(PEERS), "median_s", 1)
    names = ["zerofx-3-one-copy", "zerofx", "fsdp2", "zerofx-2", "ddp"]
    at = {name: runs[f"{key} at loopback"] for key, name in RUNS}
    bars("one-host", "a step on one host, seconds; the line: arithmetic alone", at, names, "median_s", 1)
    at = {name: runs[f"{key} at 1gbit"] for key, name in RUNS}
    bars("peaks", "most bytes that a step allocates, MB", at, list(PEERS), "peak_bytes", 1e-6)
    ladder("optimizers", "a step of the optimizer, ms", optimizer_rows())
    budget_curve()
    found = read("stages-cpu-2")["contenders"]
    names = {"zerofx-0": "zerofx stage 0", "zerofx-1": "zerofx stage 1", "zerofx-2": "zerofx stage 2", "ddp": "DDP"}
    names |= {"deepspeed-1": "DeepSpeed stage 1", "deepspeed-2": "DeepSpeed stage 2"}
    ladder("stages", "a step, seconds", [(said, found[name]["median_s"]) for name, said in names.items()])
    share = read("compile_time")["share"].values()
    rows = [(f"{who}, {s['layers']} layers", s[key]) for s in share for who, key in COMPILING]
    ladder("compiling", "seconds", rows)
    found = read("checkpoint-cpu-2")["contenders"]
    whats = {"save": "save", "load": "load", "stops": "training stops"}
    rows = [
        (f"{said}, {who}", found[key][what]["median_s"])
        for what, said in whats.items()
        for key, who in (("zerofx", "zerofx"), ("fsdp2", "FSDP2"))
    ]
    ladder("checkpoints", "seconds", rows)


COMPILING = [("zerofx", "zerofx_s"), ("torch.compile", "torch_compile_s")]


def optimizer_rows() -> list[tuple[str, float]]:
    found = read("optimizer-cpu-2")["contenders"]
    return [(re.sub(r"[*`]", "", said), found[name]["median_s"] * 1e3) for name, said in OPTIMIZERS.items()]


def hue(name: str) -> str:
    return next((colour for known, colour in HUES.items() if name.startswith(known)), HUES["other"])


def bars(file: str, label: str, at: dict[str, Any], names: list[str], key: str, unit: float) -> None:
    """A group of bars for each model, with a line across each where something cannot be beaten."""
    import matplotlib.pyplot as plt

    said = PEERS | {"zerofx-3-one-copy": "zerofx, one copy", "fsdp2": "FSDP2"}
    figure, axes = plt.subplots(2, 2, figsize=(7, 4.6), layout="constrained")
    for ax, (model, run) in zip(axes.flat, at.items()):
        here = [name for name in names if name in run["contenders"]]
        for i, name in enumerate(reversed(here)):
            value = run["contenders"][name][key] * unit
            ax.barh(i, value, color=hue(said[name]), height=0.72, alpha=0.55 if name == "zerofx-2" else 1)
            ax.text(value, i, f" {value:.2f}" if unit == 1 else f" {value:.0f}", va="center", fontsize=9)
            if key == "median_s":
                least = bound(run, name) if file == "links" else run["contenders"]["alone"]["median_s"]
                ax.plot([least, least], [i - 0.42, i + 0.42], color="#0000e2", linewidth=1.6)
        ax.set_yticks(range(len(here)), [said[name] for name in reversed(here)])
        ax.set_title(model, fontsize=10, fontweight="bold")
        plain(ax)
    figure.supxlabel(label, fontsize=10)
    write(figure, file)


def ladder(file: str, label: str, rows: list[tuple[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 0.6 + 0.3 * len(rows)), layout="constrained")
    for i, (name, value) in enumerate(reversed(rows)):
        who = next((known for known in ("zerofx", "FSDP2", "DeepSpeed", "DDP") if known in name), "other")
        ax.barh(i, value, color=HUES[who], height=0.72)
        ax.text(value, i, f" {value:.0f}" if value >= 10 else f" {value:.2f}", va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    ax.set_xlabel(label)
    plain(ax)
    write(figure, file)


def budget_curve() -> None:
    import matplotlib.pyplot as plt

    run = read("two_hosts-budgets")["runs"]["gpt at 1gbit"]["contenders"]
    x = [int(re.search(r"(\d+)MB", name)[1]) for name in run]  # type: ignore[index]
    figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    ax.plot(x, [c["median_s"] for c in run.values()], "o-", color=HUES["zerofx"])
    ax.fill_between(
        x, [c["min_s"] for c in run.values()], [c["max_s"] for c in run.values()], color=HUES["zerofx"], alpha=0.2
    )
    ax.plot(x, [c["predicted"]["time_s"] for c in run.values()], "--", color=HUES["FSDP2"])
    ax.text(x[-1], 1.6, "predicted", color=HUES["FSDP2"], ha="right")
    ax.text(x[0] + 6, 1.95, "measured: median, least to most", color=HUES["zerofx"])
    ax.set(xlabel="memory_budget, MB", ylabel="a step, seconds", ylim=(0, 2.3))
    plain(ax)
    write(figure, "budgets")


def plain(ax: Any) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.patch.set_visible(False)
    ax.margins(x=0.18)


def write(figure: Any, name: str) -> None:
    """Save as SVG and let its colours be those of the page's theme."""
    import matplotlib.pyplot as plt
    from drawing import style

    figure.patch.set_facecolor("#0000e3")
    path = HERE / f"results-{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    text = path.read_text()
    for found, ours in {"f1": "1", "f2": "2", "f3": "3", "f4": "4", "f5": "5"}.items():
        text = text.replace(f"#0000{found}", f"var(--c{ours})")
    for found, ours in {"e1": "frame", "e2": "ink", "e3": "ground"}.items():
        text = text.replace(f"#0000{found}", f"var(--c{ours})")
    text = text.replace("<defs>", style() + "\n <defs>", 1)
    text = re.sub(r"font-family: 'DejaVu Sans'[^;]*; ", "", text)
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    if "--tables" in sys.argv:
        print("\n\n".join(make() for make in TABLES))
    else:
        figures()
