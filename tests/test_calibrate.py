"""The rates that predictions rest on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch

import zerofx
from tests.workers import Workers


def calibrated() -> zerofx.Rates:
    return zerofx.calibrate()


def calibrated_on(cores: int) -> zerofx.Rates:
    had = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(had)[:cores])
    try:
        return zerofx.calibrate()
    finally:
        os.sched_setaffinity(0, had)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="sets the cores of a process as Linux does")
def test_collectives_take_from_compute_where_a_rank_has_one_core(workers2: Workers) -> None:
    for rates in workers2.run(calibrated_on, 1):
        assert 0 < rates.core_share < 1


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: "1")(0)) < 2, reason="needs two cores")
def test_collectives_take_nothing_from_compute_where_a_rank_has_a_core_to_spare(workers2: Workers) -> None:
    assert [rates.core_share for rates in workers2.run(calibrated_on, 2)] == [0, 0]


def test_calibrate_warns_where_others_have_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three seconds this process had one, by its own clock."""
    from zerofx.inspect.predict.calibrate import _note_other_work

    threads = torch.get_num_threads()
    with pytest.warns(UserWarning, match=r"this process had 33% of the .* cores .*Calibrate where nothing else runs"):
        _note_other_work(torch.device("cpu"), 3.0, 1.0 * threads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _note_other_work(torch.device("cpu"), 3.0, 2.9 * threads)
        _note_other_work(torch.device("meta"), 3.0, 0.1)


def test_all_ranks_calibrate_to_the_same_rates(workers2: Workers) -> None:
    first, second = workers2.run(calibrated)
    assert first == second
    assert 0 < first.link_bytes_per_s < float("inf")
    assert first.host_copy_bytes_per_s is None, "its memory is the host's"


def test_one_rank_has_no_link(make_workers: Callable[[int], Workers]) -> None:
    (rates,) = make_workers(1).run(calibrated)
    assert rates.link_bytes_per_s == float("inf")
    assert rates.link_latency_s == 0


def test_calibration_without_a_process_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        zerofx.calibrate()
