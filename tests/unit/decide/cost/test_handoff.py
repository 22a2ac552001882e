"""Handoffs: published measurements, overlap, buffers and the bandwidth below which moving KV is pointless."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import structs

from baton.decide.cost.catalog import model_shape
from baton.decide.cost.handoff import HandoffLink, break_even_bytes_per_s, buffer_bytes
from baton.decide.cost.parallel import Parallel
from tests.unit.decide.cost.workers import worker

GIB = 2**30


@pytest.mark.parametrize(("block_tokens", "measured_s"), [(16, 0.020), (128, 0.008)])
def test_lmcache_moves_7500_tokens_over_nvlink(block_tokens: int, measured_s: float) -> None:
    """Blocks of 16 tokens are 30,000 descriptors, one per block, layer and K or V; collated to 128 they are 3,776."""
    wire = HandoffLink(bytes_per_s=157e9, latency_s=0.0, block_tokens=block_tokens, block_descriptors=64)
    token_bytes = model_shape("llama3.1-8b").kv_token_bytes()
    assert wire.transfer_s(tokens=7500, token_bytes=token_bytes) == pytest.approx(measured_s, rel=0.02)


def test_layers_that_are_sent_under_the_prefill_leave_a_residue() -> None:
    """Splitwise: 5 to 8 ms exposed, whatever the prompt; never more than the transfer would take whole."""
    wire = HandoffLink(bytes_per_s=25e9, streaming="layerwise")
    long = {"tokens": 2048, "token_bytes": 320 * 1024.0, "layers": 80}
    assert wire.exposed_s(**long, prefill_s=0.274) == 0.006
    assert wire.transfer_s(tokens=2048, token_bytes=320 * 1024) > 0.026
    slow = structs.replace(wire, bytes_per_s=1e9)
    whole_s = slow.transfer_s(tokens=2048, token_bytes=320 * 1024)
    assert slow.exposed_s(**long, prefill_s=0.274) == pytest.approx(whole_s - 0.274 * 79 / 80 + 0.006)
    assert wire.exposed_s(tokens=1, token_bytes=320 * 1024, layers=80, prefill_s=0.0) < 0.001


def test_a_worker_streams_by_layers_where_its_wire_does() -> None:
    whole = worker("llama2-70b", "a100", Parallel(tp=8), "splitwise-vllm")
    streaming = dataclasses.replace(whole, wire=HandoffLink(bytes_per_s=25e9, streaming="layerwise"))
    slower = dataclasses.replace(whole, wire=HandoffLink(bytes_per_s=25e9))
    assert streaming.handoff_s(tokens=4096, same_host=False) == 0.006
    assert slower.handoff_s(tokens=4096, same_host=False) > 0.05
    assert whole.handoff_s(tokens=4096, same_host=True) < whole.handoff_s(tokens=4096, same_host=False)


def test_a_transfer_buffer_is_rounded_up_to_256_mib() -> None:
    assert buffer_bytes(layers=32, tokens=2048, kv_heads=8, head_dim=128, value_bytes=2) == GIB // 4
    assert buffer_bytes(layers=32, tokens=2049, kv_heads=8, head_dim=128, value_bytes=2) == GIB // 2
    assert buffer_bytes(layers=80, tokens=8192, kv_heads=8, head_dim=128, value_bytes=2) == 5 * GIB // 2


@pytest.mark.parametrize(("gpu", "published_bytes_per_s"), [("a800", 6e9), ("h800", 19e9)])
def test_mooncakes_break_even_bandwidth(gpu: str, published_bytes_per_s: float) -> None:
    """Equation 2: a prefix of 8,192 tokens of Llama-3-70B, 8 GPUs, from their peaks: 6 GB/s on A800, 19 on H800."""
    cost = worker("llama3.1-70b", gpu, Parallel(tp=8), "ideal")
    saved_s = cost.model.prompt_flops(8192) / (8 * cost.hardware.bf16_flops)
    found = break_even_bytes_per_s(token_bytes=320 * 1024, saved_s=saved_s, tokens=8192)
    assert found == pytest.approx(published_bytes_per_s, rel=0.15)
