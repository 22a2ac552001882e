"""The device of the GPU tests. `make gpu ARGS=--rehearse` runs those that can on the CPU."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="run on the CPU what does not need a GPU's memory")


def pytest_configure(config: pytest.Config) -> None:
    # Triton 3.6's interpreter converts arrays in a way that numpy 2.3 warns of, and numpy 2.4 refuses.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The GPU, or the CPU in a rehearsal."""
    if torch.cuda.is_available():
        return "cuda:0"
    if not pytestconfig.getoption("--rehearse", default=False):
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    return "cpu"


@pytest.fixture(scope="session")
def gpu(device: str) -> str:
    """A real GPU, also in a rehearsal."""
    if device == "cpu":
        pytest.skip("the CPU of a rehearsal cannot show this")
    return device
