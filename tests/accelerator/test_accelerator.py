"""zerofx on a device whose streams are really asynchronous: the CPU's numbers, no wait of the host, no order to spare.

The device is in processes of its own (`ranks.py`); this one never has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import zerofx
from tests.accelerator import cases
from tests.accelerator.cases import CASES, cases_of
from tests.accelerator.mutations import MUTATIONS
from tests.accelerator.ranks import on_accelerator
from tests.slow import quick_if, slow
from tests.workers import Workers

Losses = dict[str, list[float]]
Reference = Callable[[Sequence[str], int], Losses]

PROBES = re.findall(r"^def (\w+)\(\) -> None", (Path(__file__).parent / "probes.py").read_text(), re.MULTILINE)
SCHEDULES = ["jitter", "slow compute", "slow link", "slow copies"]
FEW = ["no_sync", "step_in_backward", "a graph break"]
LEFT_TO_SLOW = [
    "torch.optim", "a mesh of one row", "memory_budget", "from the meta device", "saved in the background",
    "activations and state on the host", "activations on the host, a graph break", "gradients on the host",
    *[name for name in CASES if name.startswith(tuple(f"{x} on the host," for x in ("gradients", "weights", "all")))],
]  # fmt: skip
QUICK = {0: "jitter", 1: "slow copies", 2: "slow compute", 3: "slow link"}


@pytest.fixture(scope="module")
def on_cpu(workers2: Workers) -> Reference:
    """Losses of cases in a stage on each rank, of ordinary ranks: by case, those of rank 0, then those of rank 1."""
    known: dict[tuple[str, int], list[float]] = {}

    def losses(names: Sequence[str], stage: int) -> Losses:
        missing = [name for name in names if (name, stage) not in known]
        first, second = workers2.run(cases.on_cpu, missing, stage)
        known.update({(name, stage): first[name] + second[name] for name in missing})
        return {name: known[name, stage] for name in names}

    return losses


def alike(found: Sequence[float], wanted: Sequence[float], bound: float = 1e-5) -> bool:
    return all(math.isclose(a, b, rel_tol=bound) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("probe", PROBES)
def test_the_device_is_one(accelerator2: Workers, probe: str) -> None:
    on_accelerator(accelerator2, f"tests.accelerator.probes:{probe}")


@pytest.mark.parametrize(
    ("stage", "schedule", "names"),
    [
        *[(stage, schedule, FEW) for stage, schedule in QUICK.items() if stage != 3],
        (3, QUICK[3], [name for name in cases_of(3) if name not in LEFT_TO_SLOW]),
        *[slow(stage, schedule, cases_of(stage)) for stage in QUICK for schedule in SCHEDULES],
    ],
    ids=lambda x: "" if isinstance(x, list) else str(x),
)
def test_training_gives_the_numbers_of_the_cpu(
    accelerator2: Workers, on_cpu: Reference, stage: int, schedule: str, names: list[str]
) -> None:
    wanted = on_cpu(names, stage)
    first, second = on_accelerator(accelerator2, "tests.accelerator.cases:on_sim", names, stage, schedule)
    other = [name for name in names if not alike(first[name] + second[name], wanted[name], CASES[name].bound)]
    assert not other, {name: (first[name] + second[name], wanted[name]) for name in other}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whether_weights_and_gradients_are_on_the_host_changes_no_bit(accelerator2: Workers, stage: int) -> None:
    """The optimizer's state is there in any case: so the step is the host's."""
    hows = ("", ", step_in_backward")
    names = [f"{what} on the host{how}" for how in hows for what in ("state", "gradients", "weights", "all")]
    names = [name for name in names if name in cases_of(stage)]
    for found in on_accelerator(accelerator2, "tests.accelerator.cases:on_sim", names, stage, "jitter"):
        for name in names:
            assert found[name] == found["state on the host" + name.partition(" on the host")[2]], name


def test_cases_differ(on_cpu: Reference) -> None:
    """An option that did nothing would prove nothing."""
    options = "no_sync", "clip_grad_norm_", "max_grad_norm", "a scheduler", "bfloat16", "int8 on the wire"
    options += "gradients on the host, summed", "all on the host, evaluated"
    found = on_cpu(["plain", *options], 3)
    for name in options:
        assert not alike(found[name], found["plain"]), name


# ---- waits of the host ----------------------------------------------------------------------------------------------

ASKED = {
    "no_sync": {"a copy to the host": 1},
    "a leaf module": {"a copy to the host": 1},
    "activations on the host, no_sync": {"a copy to the host": 1},
}
"""What the host must know of other ranks: whether they kept gradients of other parameters, or ran another expert."""


@quick_if(lambda stage: stage == 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_waits_for_nothing_in_a_step(accelerator2: Workers, stage: int) -> None:
    names = [name for name in cases_of(stage) if not CASES[name].reads]
    for found in on_accelerator(accelerator2, "tests.accelerator.cases:host_waits", names, stage):
        assert found == {name: ASKED.get(name, {}) for name in names}


def test_activations_lie_in_pinned_buffers_that_are_used_again(accelerator2: Workers) -> None:
    for first, later, two, saved in on_accelerator(accelerator2, "tests.accelerator.cases:pinned", 3):
        assert first == later >= saved and two == 2 * first


def test_activations_that_are_copied_by_others_or_captured_are_refused(accelerator2: Workers) -> None:
    for captured, copied in on_accelerator(accelerator2, "tests.accelerator.cases:refused_activations"):
        assert "inside of a CUDA graph that is captured: a replay would not know" in captured
        assert copied.startswith("backward is given a copy of what forward saved, and not what it saved")


@pytest.mark.slow
def test_the_host_waits_for_copies_alone_where_it_computes(accelerator2: Workers) -> None:
    names = [name for name in cases_of(3) if CASES[name].options.get("offload") == "cpu"]
    for found in on_accelerator(accelerator2, "tests.accelerator.cases:host_waits", names, 3):
        assert all(waits.keys() == {"Event.synchronize"} for waits in found.values()), found


@pytest.mark.parametrize(
    ("stage", "hows"),
    [
        (3, [", summed"]),
        *[
            slow(stage, ["", ", summed", ", max_grad_norm", ", a graph break", ", bfloat16", ", evaluated"])
            for stage in (1, 2, 3)
        ],
    ],
    ids=lambda x: "" if isinstance(x, list) else str(x),
)
def test_forward_and_backward_wait_for_nothing_where_gradients_and_weights_are_on_the_host(
    accelerator2: Workers, stage: int, hows: list[str]
) -> None:
    """The step waits: for gradients that come to it, and with a norm for what it has decided on the device."""
    names = [f"{what} on the host{how}" for what in ("gradients", "weights", "all") for how in hows]
    names = [name for name in names if name in cases_of(stage)]
    for found in on_accelerator(accelerator2, "tests.accelerator.cases:waits_apart", names, stage):
        assert {name: before for name, (before, _) in found.items()} == {name: {} for name in names}
        for name, (_, step) in found.items():
            norm = {"a copy to the host"} if "norm" in name else set()
            assert step.keys() == {"Event.synchronize"} | norm, (name, step)


# ---- what an order is for -------------------------------------------------------------------------------------------


@quick_if(lambda mutation, stage: stage == MUTATIONS[mutation].stages[-1] and not MUTATIONS[mutation].slow)
@pytest.mark.parametrize(
    ("mutation", "stage"), [(name, stage) for name, mutation in MUTATIONS.items() for stage in mutation.stages]
)
def test_an_order_that_is_taken_out_is_found(
    accelerator2: Workers, on_cpu: Reference, mutation: str, stage: int
) -> None:
    case = MUTATIONS[mutation].case
    first, second = on_accelerator(accelerator2, "tests.accelerator.mutations:mutated", mutation, stage)
    if isinstance(first, str):
        assert "storage" in first, first
    else:
        assert not alike(first + second, on_cpu([case], stage)[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"), [("wait", 3), ("refresh", 1), ("refresh", 2), *[("wait_grad", stage) for stage in (1, 2, 3)]]
)
def test_each_wait_of_a_group_is_needed(accelerator2: Workers, on_cpu: Reference, kind: str, stage: int) -> None:
    """Of four groups: forward's waits for weights, backward's for gradients.

    Backward's for weights are not all needed. Replicas were waited for in forward, and behind the wait for a collective
    all that were started before it are through (R5). So it is in stage 0, where nothing reads before the last wait.
    """
    wanted = on_cpu(["plain"], stage)["plain"]
    found = on_accelerator(accelerator2, "tests.accelerator.mutations:one_by_one", kind, stage)
    without = [first + second for first, second in zip(*found, strict=True)]
    assert [i for i in range(4) if alike(without[i], wanted)] == []


def test_copies_that_are_slow_are_right(accelerator2: Workers, on_cpu: Reference) -> None:
    """Under the same circumstances as mutations of them are found in."""
    case = "state on the host"
    first, second = on_accelerator(accelerator2, "tests.accelerator.mutations:with_a_slow_way_back", case, 3)
    assert alike(first + second, on_cpu([case], 3)[case])


# ---- time, on the device's clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        (3, ["optimizer", "gradients", "weights", "activations"]),
        slow(3, ["activations"]),
        slow(0, ["activations"]),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, list) else str(x),
)
def test_a_step_takes_as_long_as_what_computes_or_what_is_copied(
    accelerator2: Workers, stage: int, parts: list[str]
) -> None:
    """Copies of a twentieth and of half of what computes; seconds of a clock that does not depend on this machine."""
    options = {"stage": stage, "offload": zerofx.Offload(**dict.fromkeys(parts, "cpu"))}
    found = on_accelerator(accelerator2, "tests.accelerator.timed:measured", 8, (0.05, 0.5), options)
    assert found[0] == found[1], "ranks do the same"
    for point in found[0]:
        assert point["compute"] == pytest.approx(1, 1e-4) and point["copies"] == pytest.approx(point["ratio"], 1e-4)
        assert point["least"] <= point["step"] * (1 + 1e-9) and point["over"] < 1.15, found[0]
        assert point["predicted"] == pytest.approx(point["step"], 0.05), found[0]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["gradients"], ["weights"]], ids=str)
def test_a_step_takes_what_is_predicted_of_graphs_and_of_what_the_optimizer_copies(
    accelerator2: Workers, more: list[str]
) -> None:
    options = {"stage": 3, "offload": zerofx.Offload(**dict.fromkeys(["optimizer", *more], "cpu"))}
    for points in on_accelerator(accelerator2, "tests.accelerator.timed:measured", 8, (0.5, 2.0), options):
        for point in points:
            # The first chunk goes back when it has come out: 1 percent of a step of 24 blocks, 3 of one of 8.
            assert point["predicted"] == pytest.approx(point["step"], 0.04), points


@pytest.mark.slow
def test_of_what_can_be_on_the_host_the_fastest_that_fits_is_chosen(accelerator2: Workers) -> None:
    """Of the optimizer's state alone the step would copy as much, with nothing beside it."""
    for roomy, small in on_accelerator(accelerator2, "tests.accelerator.held:chosen", [2_200_000, 1_500_000]):
        assert [name for name, _ in roomy] == ["stage 2", "stage 3"], "nothing, where that fits"
        (first, fast), (second, slow_) = small
        assert first == "stage 3, optimizer and gradients and weights on the host" and fast < slow_
        assert second == "stage 3, optimizer on the host"


def test_copies_on_the_computing_stream_add_to_what_computes(accelerator2: Workers) -> None:
    """So that the test above can fail."""
    options = {"stage": 3, "offload": zerofx.Offload(activations="cpu")}
    for points in on_accelerator(accelerator2, "tests.accelerator.timed:on_one_stream", 3, (0.5,), options):
        assert points[0]["step"] == pytest.approx(1.5, 1e-4)


def test_the_link_to_the_host_is_measured_both_ways_at_once(accelerator2: Workers) -> None:
    for found, known, of_a_cpu in on_accelerator(accelerator2, "tests.accelerator.timed:calibrated", 1e6):
        assert found == pytest.approx(1e6) and known is not None and known > 0 and of_a_cpu == 0


# ---- memory, as the device's allocator counts it --------------------------------------------------------------------

TABLES = 10_000
"""Bytes: what the optimizer's step and the norm keep on the device beside any tensor of the model's size."""


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        (3, []),
        (3, ["optimizer", "gradients", "weights", "activations"]),
        *[slow(stage, parts) for stage in (0, 1, 2, 3) for parts in ([], ["activations"]) if (stage, parts) != (3, [])],
        *[slow(stage, ["optimizer", *more]) for stage in (1, 2, 3) for more in ([], ["gradients"])],
        *[slow(3, ["optimizer", *more]) for more in (["weights"], ["gradients", "weights"])],
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, list) else str(x),
)
def test_bytes_on_the_device_are_those_that_were_predicted(accelerator2: Workers, stage: int, parts: list[str]) -> None:
    offload = {"offload": zerofx.Offload(**dict.fromkeys(parts, "cpu"))} if parts else {}
    for found in on_accelerator(accelerator2, "tests.accelerator.held:held", 8, {"stage": stage, **offload}):
        assert found["asked"] == pytest.approx(found["predicted"], 0.001), found
        assert found["blocks"] == pytest.approx(found["predicted"], 0.005), found
        formula = 0 if "weights" in parts else found["parameters"] // (2 if stage == 3 else 1)
        assert found["at_rest"] <= found["said"] + TABLES and found["said"] <= formula + TABLES, found
