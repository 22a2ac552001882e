"""Cost estimates depend on the model and its engine, and are close to measured costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton.compute.cost_estimates import estimated_costs
from baton.compute.hash_engine import hash_card
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, Topology, WeightsChoice
from baton.core.types import HostId
from baton.decide.cost.linear import LinearCost
from baton.serve.host.build import choose_computing, priced
from baton.serve.host.sizing import share_cores, worker_views

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
CONTEXT_TOKENS = 500


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return resolve_model("smollm2-135m")


def cost(card: ModelCard, dtype: Dtype, *, threads: int = 1, weights: WeightsChoice = "dense") -> LinearCost:
    kv_bytes = card.layout(block_tokens=16, dtype=dtype).token_bytes
    prices = estimated_costs(
        card, kind="native", dtype=dtype, weights=weights, threads=threads, kv_token_bytes=kv_bytes
    )
    return LinearCost(**prices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_estimates_are_within_a_third_of_measurements(card: ModelCard, dtype: Dtype, threads: int) -> None:
    figures = json.loads((RESULTS / f"native-steps-{dtype}.json").read_text())["figures"]
    steps = figures[f"native, {dtype}, {threads} threads"]["steps"]
    prices = cost(card, dtype, threads=threads)
    for batch in (1, 8, 32):
        (step_s,) = prices.decode_run_s(requests=batch, context_tokens=CONTEXT_TOKENS * batch, steps=1)
        assert step_s == pytest.approx(steps[f"decode_{batch}"]["min_s"], rel=0.35), batch
    for prompt in (512, 2048):
        prefill_s = prices.prefill_s(new_tokens=prompt, cached_tokens=0)
        assert prefill_s == pytest.approx(steps[f"prefill_{prompt}"]["min_s"], rel=0.35), prompt


def test_smaller_weights_are_read_sooner(card: ModelCard) -> None:
    steps = [cost(card, "float32"), cost(card, "bfloat16"), cost(card, "bfloat16", weights="stored")]
    overheads = [step.step_overhead_s for step in steps]
    assert overheads == sorted(overheads, reverse=True)


def test_the_hash_engine_has_no_estimates() -> None:
    assert (
        estimated_costs(hash_card(), kind="torch", dtype="float32", weights="dense", threads=1, kv_token_bytes=1) == {}
    )


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_server_estimates_costs_that_its_configuration_omits(
    card: ModelCard, has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.serve.host.build.build_problem", lambda: "" if has_compiler else "no compiler")
    config = Config(cost={"handoff_token_s": 0.5}, topology=Topology(mixed=1), dtype="bfloat16")
    computing = choose_computing(config, card)
    found = priced(config, card, computing).cost
    threads = share_cores(len(worker_views(config.topology, HostId(""))), config.threads)[0][0]
    expected = cost(card, "bfloat16", threads=threads)
    assert (found["step_overhead_s"] == expected.step_overhead_s) == has_compiler, "without one, torch serves"
    assert found["handoff_token_s"] == 0.5, "what was said stays"


def test_estimates_use_no_more_threads_than_the_cpu_quota(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.serve.host.build.cpu_quota", lambda: 1.0)
    monkeypatch.setattr("baton.serve.host.build.build_problem", lambda: "")
    config = Config(topology=Topology(mixed=1), dtype="float32", device="cpu")
    found = priced(config, card, choose_computing(config, card)).cost
    assert found["prefill_token_s"] == cost(card, "float32", threads=1).prefill_token_s


def test_models_without_native_support_get_estimates_of_the_torch_engine(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.serve.host.build.build_problem", lambda: "")
    config = Config(topology=Topology(mixed=1), device="cpu", threads=1)
    other = replace(card, architecture="gemma2")
    found = priced(config, other, choose_computing(config, other)).cost
    assert found["step_overhead_s"] > cost(card, "float32").step_overhead_s


def test_cores_do_not_change_the_estimates_of_a_gpu(card: ModelCard) -> None:
    one, many = (
        estimated_costs(card, kind="cuda", dtype="bfloat16", weights="dense", threads=threads, kv_token_bytes=1)
        for threads in (1, 64)
    )
    assert one == many


def test_another_cost_model_is_not_changed(card: ModelCard) -> None:
    config = Config(cost={"model": "roofline", "llm": "llama3-8b", "hardware": "H100-80G-SXM"})
    computing = choose_computing(config, card)
    assert priced(config, card, computing) == config
    kinds = replace(config, cost={"kinds": {"a": {"model": "linear"}}})
    assert priced(kinds, card, computing) == kinds
