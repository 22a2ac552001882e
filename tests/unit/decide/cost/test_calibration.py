"""The roofline against measurements: every point and every fit within the error that docs/simulator.md states."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict

import pytest

from baton.decide.cost.catalog import data_text, hardware
from baton.decide.cost.engine_profile import EngineProfile, profiles
from baton.decide.cost.parallel import Parallel
from baton.decide.cost.spec import facts_of
from tests.unit.decide.cost.workers import decoding, prompts, worker

Measured = tuple[str, str, int, tuple[float, ...], tuple[float, ...]]
POINTS: list[Measured] = [
    ("llama2-70b", "A100-80G-SXM", 8, (94.3, 274.2, 1549.8), (44.9, 50.4, 71.6)),
    ("llama2-70b", "H100-80G-SXM", 8, (53.4, 136.8, 844.9), (29.8, 34.2, 50.2)),
    ("llama2-70b", "A100-80G-SXM", 4, (127, 403, 2278), (45.0, 48.5, 72.9)),
    ("llama2-70b", "H100-80G-SXM", 2, (84, 310, 1340), (37.0, 42.0)),
    ("bloom-176b", "A100-80G-SXM", 8, (173.8, 540.4, 3593), (48.8, 57.3, 96.6)),
    ("bloom-176b", "H100-80G-SXM", 8, (75.5, 253.1, 1535), (36.1, 40.6, 63.8)),
]
"""Milliseconds of one prompt of 512, 2,048 and 8,192 tokens; of a step of 1, 16 and 64 requests after 512 tokens."""


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point[0]}-{point[1][:4]}-tp{point[2]}")
def test_measured_prompts_and_steps_of_splitwise(point: Measured) -> None:
    """Prompts within 15 %, steps of decode within 6 %: the worst points of the fits."""
    llm, gpu, tp, prompts_ms, steps_ms = point
    cost = worker(llm, gpu, Parallel(tp=tp), "splitwise-vllm")
    for tokens, measured_ms in zip((512, 2048, 8192), prompts_ms, strict=True):
        assert cost.step_s(prompts(tokens)) * 1e3 == pytest.approx(measured_ms, rel=0.15), tokens
    for requests, measured_ms in zip((1, 16, 64), steps_ms, strict=False):
        assert cost.step_s(decoding(requests, context=576)) * 1e3 == pytest.approx(measured_ms, rel=0.06), requests


@pytest.mark.parametrize(("llm", "tp", "prompt_ms", "step_ms"), [("opt-13b", 1, 72.1, 42.9), ("opt-66b", 4, 109, 49.6)])
def test_measured_prompts_and_steps_of_distserve(llm: str, tp: int, prompt_ms: float, step_ms: float) -> None:
    cost = worker(llm, "A100-80G-SXM", Parallel(tp=tp), "distserve")
    assert cost.step_s(prompts(512)) * 1e3 == pytest.approx(prompt_ms, rel=0.06)
    assert cost.step_s(decoding(64, context=512)) * 1e3 == pytest.approx(step_ms, rel=0.02)


MEANS = {
    ("llama2-70b", "A100", 8): (5.0, 14.5, 2.4), ("llama2-70b", "A100", 4): (8.2, 14.3, 3.1),
    ("llama2-70b", "A100", 2): (5.6, 7.6, 2.7), ("llama2-70b", "H100", 8): (8.2, 3.5, 2.1),
    ("llama2-70b", "H100", 4): (5.3, 1.4, 2.2), ("llama2-70b", "H100", 2): (0.7, 1.7, 1.2),
    ("bloom-176b", "A100", 8): (2.3, 9.5, 1.7), ("bloom-176b", "H100", 8): (2.1, 4.8, 1.9),
}  # fmt: skip
"""Mean relative error in percent: steps of up to 2,048 prompt tokens, of more, of decode."""


def test_the_whole_profile_of_splitwise_within_the_stated_mean_errors() -> None:
    errors: dict[tuple[str, str, int], tuple[list[float], list[float], list[float]]] = defaultdict(lambda: ([], [], []))
    for row in csv.DictReader(data_text("splitwise.csv").splitlines()):
        llm, gpu, tp = row["llm"], row["hardware"], int(row["tp"])
        cost = worker(llm, gpu, Parallel(tp=tp), "splitwise-vllm")
        tokens, batch = int(row["prompt_tokens"]), int(row["batch"])
        short, long, decode = errors[llm, gpu[:4], tp]
        prompt_ms = cost.step_s(prompts(tokens, count=batch)) * 1e3
        (long if tokens * batch > 2048 else short).append(abs(prompt_ms / float(row["prompt_ms"]) - 1))
        step_ms = cost.step_s(decoding(batch, context=tokens + 64)) * 1e3
        decode.append(abs(step_ms / float(row["token_ms"]) - 1))
    means = {key: tuple(100 * sum(part) / len(part) for part in parts) for key, parts in errors.items()}
    assert means.keys() == MEANS.keys()
    for key, stated in MEANS.items():
        assert all(mean <= value + 0.15 for mean, value in zip(means[key], stated, strict=True)), (key, means[key])


def fitted_to_distserve() -> list[EngineProfile]:
    return [profile for profile in profiles() if profile.name in ("distserve", "vllm-2023")]


@pytest.mark.parametrize("profile", fitted_to_distserve(), ids=lambda item: f"{item.name}-{item.llm}-tp{item.tp}")
def test_the_fits_of_distserve(profile: EngineProfile) -> None:
    """Prompts of 128 to 2,048 tokens and decode of 8 to 64 requests of 512, as far as they fit the GPU."""
    engine, worst = ("vllm", 0.17) if profile.name == "vllm-2023" else ("distserve", 0.12)
    fits = {
        row["phase"]: [float(row[key]) for key in ("a_ms", "b_ms_per_token", "c_ms")]
        for row in csv.DictReader(data_text("distserve.csv").splitlines())
        if (row["engine"], row["llm"], row["tp"]) == (engine, profile.llm, str(profile.tp))
    }
    cost = worker(profile.llm, profile.hardware, Parallel(tp=profile.tp), profile.name)
    start, token, square = fits["prefill"]
    for tokens in (128, 256, 512, 1024, 2048):
        assert cost.step_s(prompts(tokens)) * 1e3 == pytest.approx(
            start + token * tokens + square * tokens**2, rel=worst
        )
    start, token, each = fits["decoding_smallbs"]
    fitting = facts_of(cost).kv_tokens_max // 512
    for requests in (requests for requests in (8, 16, 32, 64) if requests <= fitting):
        measured_ms = start + token * requests * 512 + each * requests
        assert cost.step_s(decoding(requests, context=512)) * 1e3 == pytest.approx(measured_ms, rel=worst), requests


def test_vidurs_layers_which_nothing_was_fitted_to() -> None:
    """Llama-2-70B, median per GPU and tp: small steps 0.89 to 1.10 of measured, large ones 0.74 to 0.91.

    The large ones are kernels of 2023, which engine profiles of that year account for with a factor above 1.
    """
    ratios: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for row in csv.DictReader(data_text("vidur.csv").splitlines()):
        tokens = int(row["tokens"])
        if row["llm"] != "llama2-70b" or not (tokens <= 64 or 512 <= tokens <= 4096):
            continue
        cost = worker("llama2-70b", row["hardware"], Parallel(tp=int(row["tp"])), "ideal")
        ratio = cost.layer_s(tokens) * 1e3 / float(row["layer_ms"])
        ratios[row["hardware"], row["tp"], tokens <= 64].append(ratio)
    for (gpu, tp, small), found in ratios.items():
        low, high = (0.89, 1.10) if small else (0.74, 0.91)
        assert low <= statistics.median(found) <= high, (gpu, tp, small, statistics.median(found))


@pytest.mark.parametrize(("gpu", "kib", "measured_us"), [("A100", 16, 6.5), ("H100", 16, 5.2), ("A100", 4096, 45.4)])
def test_all_reduce_of_eight_gpus(gpu: str, kib: int, measured_us: float) -> None:
    assert hardware(gpu).all_reduce_s(kib * 1024, 8) * 1e6 == pytest.approx(measured_us, rel=0.3)


@pytest.mark.parametrize(("gpu", "measured_us"), [("A100", 129.0), ("H100", 77.0)])
def test_all_reduce_of_eight_mib_is_the_known_weak_point(gpu: str, measured_us: float) -> None:
    """vLLM's kernel has a step there that the straight line does not: about 40 % under, and right again at 1 GiB."""
    ratio = hardware(gpu).all_reduce_s(8 * 2**20, 8) * 1e6 / measured_us
    assert 0.55 < ratio < 0.65
    assert hardware("A100").all_reduce_s(2**30, 8) == pytest.approx(8.25e-3, rel=0.05)


@pytest.mark.parametrize(
    ("llm", "tp", "pp", "tokens"),
    [("opt-13b", 1, 1, 66144), ("opt-13b", 2, 1, 163008), ("opt-66b", 4, 1, 78496), ("opt-175b", 8, 1, 59520),
     ("opt-175b", 3, 3, 76192), ("opt-66b", 2, 2, 78512)],
)  # fmt: skip
def test_kv_that_fits_beside_the_weights(llm: str, tp: int, pp: int, tokens: int) -> None:
    """DistServe measured how many tokens of KV an A100 holds: within 6 %."""
    facts = facts_of(worker(llm, "A100", Parallel(tp=tp, pp=pp), "ideal"))
    assert facts.kv_tokens_max == pytest.approx(tokens, rel=0.06)
