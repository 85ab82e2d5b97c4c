"""A test of numbers takes a ``device``: it runs in Triton's interpreter, and where there is one on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.kernels import interpreter

if find_spec("triton") is None:  # pyproject.toml asks for it on Linux alone
    collect_ignore = ["test_adamw.py", "test_found_inf.py", "test_machine_code.py", "test_master.py", "test_norm.py"]
    collect_ignore += ["test_rounding.py", "test_blockwise.py"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test puts its tensors; on ``cpu`` its whole body runs in the interpreter's process."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    return request.param


@pytest.fixture(scope="package", autouse=True)
def _interpreter() -> Iterator[None]:
    yield
    interpreter.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.funcargs.get("device") != "cpu":
        return None
    names = pyfuncitem._fixtureinfo.argnames
    interpreter.run(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    return True
