"""Predictions that the default policy is made of, on views whose times were computed by hand (see `views.COST`)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.report_parts import AnswerPace
from baton.core.types import Slo, StepShape, WorkerId, WorkerView, prefill_pairs, prompt_step
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.roofline import RooflineCost
from baton.decide.policy.answer_forecast import AnswerForecast
from baton.decide.policy.predictions import (
    PromptWork,
    ahead_s,
    compute_s,
    followers_s,
    join_s,
    prompt_work,
    queued_work,
    shared_step_s,
    under_way_s,
)
from baton.decide.policy.slo_headroom import SloHeadroom
from tests.unit.decide.policy.views import COST, cluster, request, worker
from tests.unit.lab.plan.questions import WORKED, search

SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def predicted_ttft_s(view: WorkerView, **more: object) -> float:
    """Return the TTFT that routing predicts on the only worker, 1.5 s after the first event."""
    policy, found = SloHeadroom(), replace(cluster(view), **more)
    policy.admit(request(slo=SLO), found, COST, 1.5)
    route = policy.route(request(slo=SLO), found.workers, found, COST)
    assert route.predicted is not None
    return route.predicted.ttft_s


def test_the_computed_part_of_the_running_prompt_is_not_waited_for() -> None:
    """A prompt of 1 s began 0.4 s ago: 0.6 s of it are left."""
    busy = worker("p", queued_tokens=1000)
    whole_s = predicted_ttft_s(busy)
    began = {WorkerId("p"): 1.1}
    assert predicted_ttft_s(busy, step_began_s=began) == pytest.approx(whole_s - 0.4)


def test_the_rest_of_a_long_prompt_reads_its_computed_part() -> None:
    """1,000 tokens after 9,000 computed ones: 1 s, and 9.5 million pairs at 1 us. As a prompt of its own: 1.5 s."""
    model = replace(COST, prefill_pair_s=1e-6)
    rest = worker("p", queued_tokens=1000)
    assert queued_work(rest, model).alone_s == pytest.approx(1.5005)
    work = queued_work(replace(rest, queued_pairs=prefill_pairs(1000, 9000)), model)
    assert (work.alone_s, work.context_tokens) == (pytest.approx(10.5005), 9500)


def test_no_more_than_one_step_is_taken_off_a_queue() -> None:
    """A worker that was last heard of long ago computes the first of three steps, by what is known."""
    view = replace(worker("p", queued_tokens=3000), step_tokens_max=1000)
    queue_s = compute_s(view, queued_work(view, COST), COST, step_s_max=0.045)
    assert under_way_s(view, queue_s, 0.2, step_s_max=0.045) == pytest.approx(0.2)
    assert under_way_s(view, queue_s, 9.0, step_s_max=0.045) == pytest.approx(queue_s / 3)
    decoding = replace(view, running_requests=5)
    assert under_way_s(decoding, queue_s, 9.0, step_s_max=0.045) == pytest.approx(0.045)


def test_answers_get_further_ahead_with_each_step_since_the_report() -> None:
    """Four decodes take 14 ms a step: with a TPOT of 50 ms, each second of steps gains 2.57 s."""
    view = replace(worker("m", "mixed", running_requests=4), pace=AnswerPace(0.05, 0.3), observed_at_s=10.0)
    assert ahead_s(view, 10.0, COST) == ahead_s(view, 9.0, COST) == 0.3
    assert ahead_s(view, 11.0, COST) == pytest.approx(0.3 + 0.05 / 0.014 - 1.0)
    assert ahead_s(replace(view, pace=AnswerPace(0.01, 0.3)), 12.0, COST) == 0.0
    assert ahead_s(replace(view, pace=None), 11.0, COST) == 0.0


def test_the_first_step_of_an_urgent_prompt_takes_the_spare_time_of_the_decodes() -> None:
    """1,000 tokens at 1 ms beside a step of 14 ms: alone in one step of 1.014 s, or 500 in it, the rest at 36 ms."""
    view, work = worker("m", "mixed", running_requests=4), prompt_work(1000, 0, COST)
    slow_s = compute_s(view, work, COST, step_s_max=0.05)
    assert compute_s(view, work, COST, step_s_max=0.05, spare_s=1.0) == pytest.approx(1.014)
    assert compute_s(view, work, COST, step_s_max=0.05, spare_s=1.0, urgent_s=slow_s) == slow_s
    half_s = compute_s(view, work, COST, step_s_max=0.05, spare_s=0.464)
    assert half_s == pytest.approx((slow_s + 1.014) / 2, rel=0.02)


def test_a_prompt_waits_for_the_running_decodes_before_its_first_chunk() -> None:
    """Four decodes take 14 ms a step: half of the running one, and the next one, in which its blocks are granted."""
    assert join_s(worker("d", "decode", running_requests=4), COST) == pytest.approx(1.5 * 0.014)
    assert join_s(worker("d", "decode"), COST) == 0.0


def test_a_batch_is_full_of_all_requests_on_the_worker_and_not_only_of_those_that_decode() -> None:
    """96 decodes and 60 queued prompts on a worker for 128 requests: it has no place."""
    busy = replace(worker("m", "mixed", queued_tokens=60, queued_requests=60, running_requests=156))
    free_s, full_s = predicted_ttft_s(busy), predicted_ttft_s(replace(busy, requests_max=128))
    answer_s = 200 * (0.01 + 96 * 0.001)
    assert full_s - free_s == pytest.approx(29 * answer_s / 96)


def test_decodes_beside_a_chunk_cost_what_the_model_says_of_both_together() -> None:
    """On a GPU, one read of the weights serves a chunk and the decodes: the sum of two steps would count it twice."""
    option = search(WORKED, tp=[1]).options[0]
    model: RooflineCost = option.cost
    view = replace(worker("m", "mixed", running_requests=16, context_tokens=8000), step_tokens_max=512)
    work = prompt_work(512, 0, model)
    shape = StepShape(decode_requests=16, context_tokens=8000, prefill_tokens=512, prefill_chunks=1,
                      prefill_pairs=512 * 513 // 2)  # fmt: skip
    assert compute_s(view, work, model, step_s_max=1.0) == pytest.approx(model.step_s(shape), rel=0.02)


def test_a_chunk_is_as_long_as_fits_below_a_jump_of_the_step_time() -> None:
    """Steps above 512 tokens take 64 ms more, because they run without a CUDA graph: chunks beside decodes stay below.

    With an interpolation over that jump, chunks of half the length were predicted, and a TTFT 1.6 times too long.
    """
    asked = {**WORKED, "llm": "llama3.1-70b", "engine": "vllm-v1", "weights": ["fp8"], "tp": [4]}
    model: RooflineCost = search({**asked, "hardware": [{"name": "h100", "gpus": 4}]}).options[0].cost
    view = replace(worker("m", "mixed", running_requests=2, context_tokens=4000), step_tokens_max=2048)

    def step_s(tokens: int) -> float:
        shape = prompt_step(tokens, 0)
        return model.step_s(replace(shape, decode_requests=2, context_tokens=4000))

    assert step_s(510) < 0.036 < step_s(511)
    predicted_s = compute_s(view, prompt_work(2400, 0, model), model, step_s_max=0.036)
    assert predicted_s == pytest.approx(2400 / 510 * step_s(510), rel=0.15)


def test_later_chunks_of_a_long_prompt_are_shorter() -> None:
    """Attention reads 0.1 us for each earlier token, so a chunk at the end of 8,000 tokens holds less in 36 ms."""
    model = replace(COST, prefill_token_s=4e-5, prefill_pair_s=1e-8)
    view = replace(worker("m", "mixed", running_requests=4), step_tokens_max=2048)
    work, left, steps_s = prompt_work(8000, 0, model), 8000, 0.0
    while left:  # as `SloChunked` fills its steps
        fits = [tokens for tokens in range(1, 2048) if tokens <= left and _step_s(model, tokens, 8000 - left) <= 0.036]
        steps_s += _step_s(model, max(fits), 8000 - left)
        left -= max(fits)
    assert compute_s(view, work, model, step_s_max=0.036) == pytest.approx(steps_s, rel=0.1)


def _step_s(model: LinearCost, tokens: int, cached_tokens: int) -> float:
    return model.step_s(replace(prompt_step(tokens, cached_tokens), decode_requests=4))


def test_prompts_that_share_a_step_are_bounded_by_their_ttft() -> None:
    """A step of four prompts of 100 ms takes 410 ms. 10 % of 2 s allow one prompt a step, so three steps are added."""
    view = replace(worker("p", queued_tokens=400, queued_requests=4), step_tokens_max=4000)
    assert shared_step_s(2.0, COST) == pytest.approx(0.2)
    assert shared_step_s(0.1, COST) == pytest.approx(8 * COST.step_s(prompt_step(1, 0)))
    together, bounded = queued_work(view, COST), queued_work(view, COST, 2.0)
    assert together.alone_s == pytest.approx(0.4)
    assert bounded.alone_s == pytest.approx(0.4 + 3 * 0.01)


@pytest.mark.parametrize(
    ("arriving_ratio", "more"),
    [(0.0, 0), (0.2, 0), (0.5, 1), (0.9, 1), (9.0, 3)],
)
def test_prompts_that_arrive_meanwhile_extend_the_step(arriving_ratio: float, more: int) -> None:
    """Prompts of 50 ms, a wait of 80 ms, and steps of 250 ms, which hold three more beside the queued one and ours."""
    view = replace(worker("p", queued_tokens=50), step_tokens_max=4000)
    found_s = followers_s(
        view, prompt_work(50, 0, COST), 0.08, arriving_ratio=arriving_ratio, mean_tokens=50.0, step_s=0.25
    )
    assert found_s == pytest.approx(0.05 * more)


def test_nothing_extends_the_step_of_a_prompt_that_fills_it() -> None:
    view = replace(worker("p", queued_tokens=50), step_tokens_max=300)
    long = prompt_work(900, 0, COST)
    assert followers_s(view, long, 1.0, arriving_ratio=1.0, mean_tokens=50.0, step_s=0.25) == 0.0
    assert followers_s(view, PromptWork(0, 0.0), 1.0, arriving_ratio=1.0, mean_tokens=50.0, step_s=0.25) == 0.0


def test_prompts_take_their_recent_share_of_the_time_of_an_answer() -> None:
    """A prompt of 1 s every 4 s: a quarter of the time. Alone, a token takes 11 ms; beside the prompts 11 / 0.75."""
    forecast, slo = AnswerForecast(output_tokens=200.0), Slo(ttft_s=9.0, tpot_s=0.05)
    view, asked = worker("m", "mixed"), request(slo=slo)
    seen = cluster(view)
    for turn in range(20):
        forecast.now_s = 4.0 * turn
        forecast.note_prompt(asked, view, prompt_work(1000, 0, COST), seen, COST)
    forecast.now_s += 2.0
    assert forecast.predict(view, asked, seen, COST).tpot_s == pytest.approx(0.011 / 0.75, rel=0.05)


def test_the_share_of_prompts_is_known_soon_after_the_first_ones() -> None:
    """After 4 s, the decayed sum holds a third of the work that it holds later: the time is counted likewise."""
    forecast, slo = AnswerForecast(output_tokens=200.0), Slo(ttft_s=9.0, tpot_s=0.05)
    view, asked = worker("m", "mixed"), request(slo=slo)
    seen = cluster(view)
    for turn in range(9):
        forecast.now_s = 0.5 * turn
        forecast.note_prompt(asked, view, prompt_work(125, 0, COST), seen, COST)
    assert forecast.predict(view, asked, seen, COST).tpot_s == pytest.approx(0.011 / 0.75, rel=0.1)
