"""What every cost model keeps, whatever it is made of: the port's promises, as properties."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from baton.core.ports import CostModel
from baton.core.types import StepShape
from baton.decide.cost.load import load_cost
from baton.decide.cost.parallel import Parallel, Precision, split_memory
from tests.unit.decide.cost.workers import decoding, prompts, worker

SECTIONS: dict[str, dict[str, object]] = {
    "linear": {"model": "linear"},
    "roofline": {"model": "roofline", "llm": "llama2-70b", "hardware": "a100", "tp": 8, "engine": "splitwise-vllm"},
    "roofline-pp": {"model": "roofline", "llm": "opt-66b", "hardware": "a100", "tp": 2, "pp": 2, "engine": "distserve"},
    "roofline-cp": {"model": "roofline", "llm": "llama3.1-8b", "hardware": "h100", "tp": 2, "cp": 2},
    "roofline-dcp": {
        "model": "roofline", "llm": "deepseek-v3", "hardware": "h200", "tp": 8, "dcp": 8, "weights": "fp8",
    },
    "roofline-mla": {"model": "roofline", "llm": "deepseek-v3", "hardware": "h200", "tp": 8, "weights": "fp8"},
    "roofline-ep": {
        "model": "roofline", "llm": "deepseek-v3", "hardware": "h800", "dp": 32, "ep": 32, "weights": "fp8",
    },
    "roofline-moe": {"model": "roofline", "llm": "qwen3-30b-a3b", "hardware": "l40s", "tp": 2, "kv": "fp8"},
    "roofline-overlap": {
        "model": "roofline", "llm": "llama3.1-70b", "hardware": "h100", "tp": 4, "overlap_tokens_min": 512,
    },
    "drafted": {
        "model": "roofline", "llm": "llama3.1-70b", "hardware": "h100", "tp": 4,
        "draft": {"llm": "llama3.1-8b", "tokens": 3, "acceptance_ratio": 0.7},
    },
    "splitwise": {"model": "table", "profile": "splitwise", "llm": "bloom-176b", "hardware": "h100", "tp": 8},
    "distserve": {"model": "table", "profile": "distserve", "llm": "opt-13b", "tp": 1},
    "vidur": {"model": "table", "profile": "vidur", "llm": "llama2-70b", "hardware": "h100", "tp": 4},
    "splitwise-sim": {"model": "splitwise-sim", "llm": "llama2-70b", "hardware": "a100", "tp": 8},
}  # fmt: skip
COSTS: dict[str, CostModel] = {name: load_cost(raw, folder=Path()).cost for name, raw in SECTIONS.items()}
NOT_MONOTONE = ("distserve", "splitwise-sim", "roofline-overlap")
MONOTONE = {name: cost for name, cost in COSTS.items() if name not in NOT_MONOTONE}
"""DistServe's two decode fits do not meet at 95 requests, and Splitwise's simulator keeps the noise of its medians. Two
micro-batches may take less than one batch of a token less."""

costs = st.sampled_from(sorted(COSTS))
monotone = st.sampled_from(sorted(MONOTONE))


@given(name=costs, requests=st.integers(1, 300), context=st.integers(0, 4000), steps=st.integers(0, 40))
def test_a_run_of_decode_steps_is_those_steps_to_the_last_bit(
    name: str, requests: int, context: int, steps: int
) -> None:
    """A simulation that jumps over steps ends where one that takes them ends."""
    cost, first = COSTS[name], context * requests
    shapes = [StepShape(decode_requests=requests, context_tokens=first + n * requests) for n in range(steps)]
    run_s = cost.decode_run_s(requests=requests, context_tokens=first, steps=steps)
    assert list(run_s) == [cost.step_s(shape) for shape in shapes]


@given(name=costs, new=st.integers(1, 40_000), cached=st.integers(0, 100_000))
def test_a_prompt_costs_what_the_step_costs_that_computes_it(name: str, new: int, cached: int) -> None:
    cost = COSTS[name]
    prompt_s = cost.prefill_s(new_tokens=new, cached_tokens=cached)
    assert prompt_s == cost.step_s(prompts(new, cached=cached))
    assert prompt_s > 0
    assert cost.prefill_s(new_tokens=0, cached_tokens=cached) == 0.0


@given(name=monotone, new=st.integers(1, 20_000), more=st.integers(1, 500), cached=st.integers(0, 50_000))
def test_a_longer_prompt_never_takes_less(name: str, new: int, more: int, cached: int) -> None:
    cost = MONOTONE[name]
    assert cost.prefill_s(new_tokens=new + more, cached_tokens=cached) >= cost.prefill_s(
        new_tokens=new, cached_tokens=cached
    )


@given(name=monotone, requests=st.integers(1, 400), context=st.integers(1, 8000))
def test_one_more_decoding_request_never_takes_less(name: str, requests: int, context: int) -> None:
    cost = MONOTONE[name]
    one_more = StepShape(decode_requests=requests + 1, context_tokens=requests * context + context)
    assert cost.step_s(one_more) >= cost.step_s(decoding(requests, context=context)) > 0


@given(name=monotone, new=st.integers(1, 4000), requests=st.integers(1, 200), context=st.integers(1, 4000))
def test_a_step_with_both_takes_at_least_as_long_as_either(name: str, new: int, requests: int, context: int) -> None:
    prompt, decode = prompts(new), decoding(requests, context=context)
    both = StepShape(
        prefill_tokens=prompt.prefill_tokens, prefill_chunks=1, prefill_pairs=prompt.prefill_pairs,
        decode_requests=requests, context_tokens=decode.context_tokens,
    )  # fmt: skip
    both_s = MONOTONE[name].step_s(both)
    if name != "drafted":
        assert both_s >= MONOTONE[name].step_s(decode)
    assert both_s >= MONOTONE[name].step_s(prompt)


@given(name=monotone, tokens=st.integers(2, 20_000), data=st.data())
def test_a_longer_hit_on_one_prompt_costs_no_more(name: str, tokens: int, data: st.DataObject) -> None:
    """Up to 1 %: an efficiency that grows with a chunk's length makes the last few tokens of a chunk nearly free."""
    hit = data.draw(st.integers(0, tokens - 1))
    longer = data.draw(st.integers(hit, tokens))
    cost = MONOTONE[name]
    short_s = cost.prefill_s(new_tokens=tokens - hit, cached_tokens=hit)
    assert cost.prefill_s(new_tokens=tokens - longer, cached_tokens=longer) <= 1.01 * short_s


@given(name=costs, tokens=st.integers(0, 100_000), more=st.integers(1, 10_000), same=st.booleans())
def test_a_handoff_of_more_never_takes_less(name: str, tokens: int, more: int, same: bool) -> None:
    cost = COSTS[name]
    assert 0 <= cost.handoff_s(tokens=tokens, same_host=same) <= cost.handoff_s(tokens=tokens + more, same_host=same)


def test_more_gpus_take_less_of_a_long_prompt_but_never_in_proportion() -> None:
    """The all-reduce and the parts that are not split see to that."""
    times_s = [
        worker("llama2-7b", "a100", Parallel(tp=tp), "ideal").prefill_s(new_tokens=4096, cached_tokens=0)
        for tp in (1, 2, 4, 8)
    ]
    assert all(slow > fast > slow / 2 for slow, fast in pairwise(times_s))


def test_smaller_weights_speed_up_decode_by_what_is_not_read() -> None:
    """One request reads all weights and hardly anything else; fp8 halves that, int4 takes about a quarter."""
    bf16, fp8, int4 = (
        worker("llama3.1-70b", "h100", Parallel(tp=4), "ideal", Precision(weights=weights)).step_s(
            decoding(1, context=100)
        )
        for weights in ("bf16", "fp8", "int4")
    )
    assert 1.5 < bf16 / fp8 < 2.0
    assert 2.0 < bf16 / int4 < 3.8


def test_fp8_kv_halves_what_a_long_context_adds() -> None:
    def added_s(kv: Precision) -> float:
        cost = worker("llama3.1-70b", "h100", Parallel(tp=4), "ideal", kv)
        return cost.step_s(decoding(16, context=8000)) - cost.step_s(decoding(16, context=0))

    assert added_s(Precision()) == pytest.approx(2 * added_s(Precision(kv="fp8")))


def test_a_latent_reads_far_less_than_heads_would() -> None:
    """DeepSeek-V3 keeps 576 values a token and layer where its 128 heads of 128 would keep 32,768."""
    cost = worker("deepseek-v3", "h200", Parallel(tp=8), "ideal", Precision(weights="fp8"))
    assert cost.model.kv_token_bytes() == 61 * 576 * 2
    heads = dataclasses.replace(cost, model=structs.replace(cost.model, latent=None))
    few, many = decoding(8, context=0), decoding(8, context=8192)
    latent_s, heads_s = (each.step_s(many) - each.step_s(few) for each in (cost, heads))
    assert 4 < heads_s / latent_s < 8, "each GPU reads the whole latent, or an eighth of the heads"


def test_a_batch_touches_more_and_more_experts_and_then_all() -> None:
    """Few tokens read few experts' weights, so a small batch of an expert model is cheap and its growth is steep."""
    cost = worker("qwen3-30b-a3b", "h100", Parallel(), "ideal")
    one, eight, many, more = (cost.step_s(decoding(requests, context=1)) for requests in (1, 8, 256, 320))
    assert eight > 2.5 * one
    assert more < 1.2 * many


def test_wide_expert_parallel_decodes_more_tokens_per_gpu() -> None:
    """What DeepSeek does with 144 GPUs: every GPU reads few experts for very many tokens."""
    narrow = worker("deepseek-v3", "h800", Parallel(dp=32, ep=32), "ideal", Precision(weights="fp8"))
    wide = worker("deepseek-v3", "h800", Parallel(dp=144, ep=144), "ideal", Precision(weights="fp8"))
    narrow_s, wide_s = (cost.step_s(decoding(64 * cost.parallel.gpus, context=4989)) for cost in (narrow, wide))
    assert wide_s < narrow_s


def test_drafts_pay_where_they_are_accepted() -> None:
    raw = dict(SECTIONS["drafted"])
    plain = load_cost({key: value for key, value in raw.items() if key != "draft"}, folder=Path()).cost
    shape = decoding(1, context=500)

    def ratio(acceptance: float) -> float:
        raw["draft"] = {"llm": "llama3.1-8b", "tokens": 3, "acceptance_ratio": acceptance}
        return load_cost(raw, folder=Path()).cost.step_s(shape) / plain.step_s(shape)

    assert ratio(0.9) < 0.6
    assert ratio(0.0) > 1.0


def test_stages_of_a_pipeline_make_prompts_faster_and_decode_no_slower_than_its_weights() -> None:
    one = worker("opt-66b", "a100", Parallel(tp=2), "ideal")
    two = worker("opt-66b", "a100", Parallel(tp=2, pp=2), "ideal")
    assert two.prefill_s(new_tokens=2048, cached_tokens=0) < 0.85 * one.prefill_s(new_tokens=2048, cached_tokens=0)
    few, many = decoding(2, context=500), decoding(64, context=500)
    assert two.step_s(few) == pytest.approx(one.step_s(few), rel=0.1)
    assert two.step_s(many) < one.step_s(many)


def test_power_is_between_idle_and_the_rating_and_prompts_draw_more() -> None:
    cost = worker("llama2-70b", "a100", Parallel(tp=8), "ideal")
    prompt_w, decode_w = cost.power_w(prompts(2048)), cost.power_w(decoding(16, context=600))
    assert 8 * 400 >= prompt_w > decode_w > 0.2 * 8 * 400


@pytest.mark.parametrize(("tp", "measured"), [(8, 0.43), (4, 0.59), (2, 0.73)])
def test_power_of_decode_is_what_splitwise_measured(tp: int, measured: float) -> None:
    """Share of the rating, one request of Llama-2-70B on A100."""
    cost = worker("llama2-70b", "a100", Parallel(tp=tp), "splitwise-vllm")
    assert cost.power_w(decoding(1, context=576)) / (400 * tp) == pytest.approx(measured, abs=0.06)


def test_the_rest_of_a_long_hit_costs_no_more_than_decoding_it() -> None:
    """16 tokens after 100,000 cached ones: the formula for whole prompts alone would say ten times as much."""
    cost = worker("llama2-70b", "h100", Parallel(tp=8), "ideal")
    rest_s = cost.prefill_s(new_tokens=16, cached_tokens=100_000)
    assert rest_s <= 1.05 * cost.step_s(decoding(16, context=100_000))


def test_a_step_of_one_request_reads_its_experts_alone() -> None:
    """All experts counted, a step of one request used 2.6 times the bandwidth that there is."""
    cost = worker("qwen3-235b-a22b", "h100", Parallel(tp=8, ep=8), "ideal")
    _, one = cost.peak_ratios(decoding(1, context=1000))
    _, many = cost.peak_ratios(decoding(256, context=256_000))
    read = cost.model.active_params * 2 / 8 / cost.hardware.memory_bytes_per_s / cost.step_s(decoding(1, context=1000))
    assert one == pytest.approx(read, rel=0.1)
    assert one < many < 1.0


def test_two_micro_batches_hide_the_exchange_of_long_steps_and_read_the_weights_twice() -> None:
    """70B on four H100. The sums of a long prompt cost a fifth of its time; a short step is bound by the weights."""
    one, always, long = (
        worker("llama3.1-70b", "h100", Parallel(tp=4, overlap_tokens_min=least), "vllm-v1") for least in (0, 1, 512)
    )
    parts = one._layer
    for shape, saves in (
        (prompts(8192), True),
        (decoding(2048, context=500), True),
        (decoding(64, context=500), False),
    ):
        assert (always.step_s(shape) < one.step_s(shape)) is saves
    saved_s = one.step_s(prompts(8192)) - always.step_s(prompts(8192))
    assert 0 < saved_s <= one.engine.prompt_phase(8192).factor * parts.exchange_s(8192)
    assert long.step_s(decoding(64, context=500)) == one.step_s(decoding(64, context=500))
    assert long.step_s(prompts(8192)) == always.step_s(prompts(8192))
    alone = worker("llama3.1-8b", "h100", Parallel(), "vllm-v1")
    assert alone._layer.exchange_s(8192) == 0.0


@pytest.mark.parametrize(("llm", "dcp"), [("qwen3-235b-a22b", 2), ("deepseek-v3", 8)])
def test_ranks_that_share_tokens_hold_more_and_read_less_at_the_price_of_an_exchange(llm: str, dcp: int) -> None:
    precision = Precision(weights="fp8")
    whole, shared = (worker(llm, "h200", Parallel(tp=8, dcp=each), "vllm-v1", precision) for each in (1, dcp))
    held = [split_memory(each.model, each.hardware, each.parallel, precision).kv_tokens for each in (whole, shared)]
    assert held[1] == pytest.approx(dcp * held[0], rel=1e-5)
    assert shared.step_s(decoding(8, context=128_000)) < 0.8 * whole.step_s(decoding(8, context=128_000))
    for shape in (decoding(64, context=500), prompts(8192)):
        assert whole.step_s(shape) < shared.step_s(shape) < 1.5 * whole.step_s(shape)


def test_a_share_of_tokens_needs_ranks_with_the_same_head() -> None:
    model = worker("qwen3-235b-a22b", "h200", Parallel(tp=8), "ideal").model
    assert Parallel(tp=8, dcp=2).problems(model) == []
    (problem,) = Parallel(tp=8, dcp=4).problems(model)
    assert problem.startswith("dcp 4 needs tp to be a multiple of 16, 4 GPUs for each KV head of qwen3-235b-a22b")
