"""A GPU that the catalogue does not have: what its owner says holds, the rest is borrowed and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.decide.cost.catalog import all_hardware, hardware
from baton.decide.cost.custom_hardware import CustomHardware, described, nearest_hardware
from baton.decide.cost.load import load_cost
from baton.decide.cost.roofline import RooflineCost
from tests.unit.decide.cost.workers import decoding, prompts

OWN: dict[str, Any] = {
    "name": "MI300X", "bf16_flops": 1307e12, "fp8_flops": 2615e12, "memory_bytes": 192e9, "memory_bytes_per_s": 5.3e12,
    "gpu_w": 750, "intra_node_bytes_per_s": 448e9, "inter_node_bytes_per_s": 50e9, "usd_per_hour": 3.0,
}  # fmt: skip
SECTION: dict[str, Any] = {"model": "roofline", "llm": "llama3.1-8b", "hardware": OWN, "weights": "fp8"}


def problems(**gpu: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_cost({**SECTION, "hardware": gpu}, folder=Path())
    return str(caught.value)


def test_a_described_gpu_is_a_worker_like_any_other() -> None:
    loaded = load_cost(SECTION, folder=Path())
    facts = loaded.kinds[""]
    assert facts.usd_per_hour == 3.0
    assert facts.power_w == pytest.approx(1.6 * 750)
    assert facts.kv_tokens_max * facts.kv_token_bytes == pytest.approx(0.9 * 192e9 - 8.5e9, rel=0.01)
    assert facts.notes[0].startswith("MI300X: kernel efficiencies of h200, all-reduce of h200, scaled to its peaks")
    assert "p2p_latency_s of H200-141G-SXM" in facts.notes[0]


def test_twice_the_peaks_take_half_the_time() -> None:
    twice = {**OWN, "bf16_flops": 2 * 1307e12, "fp8_flops": 2 * 2615e12, "memory_bytes_per_s": 2 * 5.3e12}

    def kernels_s(gpu: dict[str, Any]) -> tuple[float, float]:
        section = {**SECTION, "engine": "ideal", "hardware": {**gpu, "like": "h200"}}
        cost = load_cost(section, folder=Path()).cost
        return cost.step_s(prompts(8192)), cost.step_s(decoding(64, context=2000))

    for slow, fast in zip(kernels_s(OWN), kernels_s(twice), strict=True):
        assert 0.5 <= fast / slow < 0.6, "kernels have a start-up time"


def test_a_gpu_like_a_known_one_is_that_one_but_for_what_is_said() -> None:
    known = hardware("h100")
    larger = described(CustomHardware(name="H100-NVL", like="h100", memory_bytes=94e9))
    assert (larger.memory_bytes, larger.bf16_flops, larger.fp8_flops) == (94e9, known.bf16_flops, known.fp8_flops)
    assert (larger.usd_per_hour, larger.node_w) == (known.usd_per_hour, known.node_w)
    assert described(CustomHardware(name="H100-eco", like="h100", gpu_w=500)).node_w is None


def test_unstated_arithmetic_and_prices_are_not_borrowed() -> None:
    """It is nearest to an H100, which has fp8 and a price."""
    plain = {key: OWN[key] for key in ("name", "memory_bytes")}
    found = described(CustomHardware(**plain, bf16_flops=950e12, memory_bytes_per_s=3.3e12))
    assert "H100-80G-SXM" in found.note
    assert (found.fp8_flops, found.int8_flops, found.usd_per_hour, found.node_w) == (None, None, None, None)


@pytest.mark.parametrize("name", list(all_hardware()))
def test_what_is_as_fast_as_a_known_gpu_is_nearest_to_one_that_is(name: str) -> None:
    gpu = hardware(name)
    found = nearest_hardware(bf16_flops=gpu.bf16_flops, memory_bytes_per_s=gpu.memory_bytes_per_s)
    assert (found.bf16_flops, found.memory_bytes_per_s) == (gpu.bf16_flops, gpu.memory_bytes_per_s)


def test_kinds_of_a_cluster_may_share_a_described_gpu() -> None:
    raw = {**SECTION, "kinds": {"narrow": {}, "wide": {"tp": 2}}}
    loaded = load_cost(raw, folder=Path())
    cost = loaded.cost.on("wide")
    assert isinstance(cost, RooflineCost)
    assert cost.hardware.name == "MI300X"
    assert loaded.kinds["wide"].gpus == 2


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({"name": "X", "bf16_flops": 3e14}, "hardware X: memory_bytes, memory_bytes_per_s are missing; or say which"),
        ({**OWN, "bf16_flops": 1307}, "bf16_flops is 1307, but must be at least 1e+12 and finite: write FLOP/s, such"),
        ({**OWN, "memory_bytes": 192}, "memory_bytes is 192, but must be at least 1e+09 and finite: write bytes, such"),
        ({**OWN, "gpus_per_node": 0}, "gpus_per_node is 0, but must be at least 1"),
        ({**OWN, "p2p_latency_s": -1}, "p2p_latency_s is -1, but must be at least 0"),
        ({**OWN, "usd_per_hour": float("inf")}, "usd_per_hour is inf, but must be at least 0 and finite"),
        ({**OWN, "like": "h1000"}, "hardware MI300X: like: unknown hardware 'h1000'"),
        ({**OWN, "name": "h100"}, 'the catalogue has H100-80G-SXM: give yours another name, and like = "h100"'),
        ({**OWN, "name": ""}, "hardware needs a name"),
        ({**OWN, "memory_byte": 1e9}, "unknown key cost.hardware.memory_byte (did you mean 'memory_bytes'?)"),
        ({**OWN, "memory_bytes": "192 GB"}, "cost.hardware.memory_bytes is '192 GB', but must be a number"),
        ({"bf16_flops": 3e14}, "cost.hardware.name is missing"),
    ],
)
def test_what_a_description_may_get_wrong(gpu: dict[str, Any], said: str) -> None:
    assert said in problems(**gpu)


def test_every_problem_of_a_description_at_once() -> None:
    found = problems(name="X", bf16_flops=312, memory_bytes=80).splitlines()
    assert len(found) == 3, found


def test_without_fp8_arithmetic_there_are_no_fp8_weights() -> None:
    assert "MI300X does not compute in fp8" in problems(**{key: OWN[key] for key in OWN if key != "fp8_flops"})
