"""A configuration that no engine can compute is refused before the arena is reserved and workers start."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from baton.compute import attention_choice
from baton.compute.attention_choice import attention_problem, flex_arena_problem
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Precision
from baton.compute.models.resolve import resolve_model
from baton.core.config import AttentionName, Config, KVConfig, PhaseConfig, Topology
from baton.core.errors import ConfigError
from baton.core.types import HostId
from baton.decide.kv.layout import KVDtype
from baton.move.arena.cuda_driver import CudaDriver
from baton.serve.host import build
from baton.serve.host.build import Device, build_host, choose_computing
from tests import fake_cuda
from tests.dummies import small

ON_CPU = Config(topology=Topology(prefill=1, decode=1), kv=KVConfig(blocks=8), device="cpu", dtype="float32")
BFLOAT16_KV, INT8_KV = KVConfig(blocks=8, dtype="bfloat16"), KVConfig(blocks=8, dtype="int8")


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return resolve_model(small("llama-3.1-8b", tmp_path_factory.mktemp("llama")), "dummy")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_backend": "triton"}, "--attention-backend triton needs a GPU; use --attention-backend sdpa"),
        ({"attention_backend": "flex", "kv": BFLOAT16_KV}, "KV is bfloat16 and the computation float32"),
        (
            {"attention_backend": "sdpa", "weights": "int8"},
            "weights = 'int8' needs the native engine: attention is sdpa",
        ),
        ({"attention_backend": "jagged", "kv": INT8_KV}, "KV in int8 needs the native engine, and --attention-backend"),
        ({"attention_backend": "sdpa", "decode": PhaseConfig(weights="int8")}, "weights = 'int8' needs the native"),
    ],
    ids=str,
)
def test_a_host_refuses_what_its_workers_could_not_load(
    card: ModelCard, changes: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "create_arena", None)
    config = msgspec.structs.replace(ON_CPU, **changes)
    with pytest.raises(ConfigError) as refused:
        build_host(config, card, choose_computing(config, card), HostId("host-0"))
    assert words in str(refused.value)


@pytest.mark.parametrize("attention", ["auto", "native"])
def test_a_machine_without_a_compiler_refuses_what_needs_the_native_engine(
    card: ModelCard, attention: AttentionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "build_problem", lambda: "no C++ compiler")
    config = msgspec.structs.replace(ON_CPU, attention_backend=attention, weights="int8")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler; use"):
        build_host(config, card, choose_computing(config, card), HostId("host-0"))


@pytest.mark.parametrize(
    ("attention", "head_dim", "kv_dtype", "words"),
    [
        ("flex", 512, "bfloat16", "flex attention on a GPU takes heads of up to 256 values"),
        ("flex", 64, "float32", "KV is float32 and the computation bfloat16"),
        ("flex", 64, "bfloat16", ""),
        ("native", 64, "bfloat16", "native cannot be used: .* the device is cuda:0; use --attention-backend triton"),
        ("auto", 64, "int8", "KV in int8 needs the native engine .*the device is cuda:0"),
    ],
)
def test_a_gpu_refuses_what_its_workers_could_not_load(
    card: ModelCard, attention: AttentionName, head_dim: int, kv_dtype: KVDtype, words: str
) -> None:
    layout = msgspec.structs.replace(card.layout(block_tokens=16, dtype=kv_dtype), head_dim=head_dim)
    problem = attention_problem(card, layout, "cuda:0", attention, Precision("bfloat16", "dense"))
    assert re.search(words, problem) if words else problem == ""


def test_a_gpu_refuses_an_arena_that_flex_cannot_address(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^31 numbers of bfloat16 take 4 GiB."""
    device = Device("cuda:0", (CudaDriver(0, fake_cuda.build(tmp_path)),))
    monkeypatch.setattr(build, "choose_device", lambda *_, **__: device)
    monkeypatch.setattr(build, "create_cuda_arena", None)
    changes = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flex", "topology": Topology(mixed=1)}
    config = msgspec.structs.replace(ON_CPU, **changes, kv=KVConfig(bytes=5 << 30))
    words = rf"addresses 2\^31 numbers, and .* blocks have {5 << 29}; set kv.bytes to at most {4 << 30}, or use"
    with pytest.raises(ConfigError, match=words):
        build_host(config, card, choose_computing(config, card), HostId("host-0"))
    layout = card.layout(block_tokens=16, dtype="bfloat16")
    assert flex_arena_problem(layout, (4 << 30) // layout.block_bytes, "cuda:0") == ""
    assert flex_arena_problem(layout, (5 << 30) // layout.block_bytes, "cpu") == ""


def test_a_server_without_workers_of_its_own_takes_any_backend(card: ModelCard) -> None:
    """Its hosts on other machines have other devices, and check for themselves."""
    config = msgspec.structs.replace(ON_CPU, topology=Topology(), attention_backend="triton")
    assert choose_computing(config, card).attention_backend == "triton"
