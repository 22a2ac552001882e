"""The engines whose servers pass the same tests. Their fakes follow the interfaces that the real servers have."""

from __future__ import annotations

import pytest

from tests.engines.fake_engine import FakeEngine
from tests.engines.fake_sglang import FakeSglang
from tests.engines.fake_vllm import FakeVllm


@pytest.fixture(params=[FakeVllm, FakeSglang], ids=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> type[FakeEngine]:
    return request.param
