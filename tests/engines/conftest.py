"""The engines whose servers pass the same tests. Their fakes follow the interfaces that the real servers have."""

from __future__ import annotations

import pytest

from tests.engines.fake_engine import FakeEngine
from tests.engines.fake_llamacpp import FakeLlamaCpp
from tests.engines.fake_openai import FakeOpenAi, FakeOpenAiText
from tests.engines.fake_sglang import FakeSglang
from tests.engines.fake_vllm import FakeVllm

_ENGINES: dict[str, type[FakeEngine]] = {
    "vllm": FakeVllm,
    "sglang": FakeSglang,
    "openai": FakeOpenAi,
    "openai-text": FakeOpenAiText,
    "llamacpp": FakeLlamaCpp,
}


@pytest.fixture(params=_ENGINES.values(), ids=_ENGINES.keys())
def engine(request: pytest.FixtureRequest) -> type[FakeEngine]:
    return request.param


@pytest.fixture(params=[FakeVllm, FakeSglang, FakeOpenAi, FakeOpenAiText], ids=["vllm", "sglang", "openai", "text"])
def pooled_engine(request: pytest.FixtureRequest) -> type[FakeEngine]:
    """Engines whose requests share one KV cache, instead of having slots of fixed sizes."""
    return request.param


@pytest.fixture(params=[FakeVllm, FakeSglang, FakeOpenAi], ids=["vllm", "sglang", "openai"])
def token_engine(request: pytest.FixtureRequest) -> type[FakeEngine]:
    """Engines whose answers are token ids."""
    return request.param


@pytest.fixture(params=[FakeVllm, FakeSglang], ids=["vllm", "sglang"])
def kv_engine(request: pytest.FixtureRequest) -> type[FakeEngine]:
    """Engines that tell their load, publish KV events and hand off KV."""
    return request.param
