"""A simulated cluster whose steps scatter: drawn with its seed, unknown to the policies."""

from __future__ import annotations

import msgspec
import pytest

from baton.decide.cost.noise import StepNoise
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, SimWorkers
from baton.lab.workload.request import Trace, TraceRequest

COST = {"model": "linear", "step_overhead_s": 0.01, "prefill_token_s": 1e-4, "decode_request_s": 1e-3}
FIT = {"start_s": 0.01, "band_s": [1e-4] * 5, "sequence_s": 0.0, "decode_s": 0.0, "pair_s": 0.0, "context_token_s": 0.0}
NOISE = StepNoise(step_sigma=0.1, speed_sigma=0.3, speed_s=1.0, stalls_per_s=0.2, stall_s=0.3)
TRACE = Trace(
    format="made",
    timing="absolute",
    requests=tuple(TraceRequest(at_s=0.05 * index, input_tokens=200, output_tokens=40) for index in range(60)),
)


def spec(kind: SimKind) -> ClusterSpec:
    workers = (SimWorkers(role="prefill", kind="cpu"), SimWorkers(role="decode", kind="cpu"))
    return ClusterSpec(workers=workers, kinds={"cpu": kind})


def played(kind: SimKind, seed: int = 0) -> list[RequestRecord]:
    return replay_trace(spec(kind), TRACE, policy="baton", seed=seed)


def test_steps_scatter_by_the_seed() -> None:
    noisy = SimKind(cost=COST, noise=NOISE)
    first, again, other = ([record.end_s for record in played(noisy, seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_tail_is_longer_than_without_noise() -> None:
    calm, noisy = played(SimKind(cost=COST)), played(SimKind(cost=COST, noise=NOISE))
    assert max(record.ttft_s or 0.0 for record in noisy) > max(record.ttft_s or 0.0 for record in calm)


def test_a_fit_of_step_logs_brings_its_noise() -> None:
    fit = {**FIT, "noise": msgspec.to_builtins(NOISE)}
    assert spec(SimKind(cost={"model": "fitted", "fit": fit})).noise_of("cpu") == NOISE
    calm = StepNoise()
    assert spec(SimKind(cost={"model": "fitted", "fit": fit}, noise=calm)).noise_of("cpu") == calm
    assert spec(SimKind(cost={"model": "fitted", "fit": FIT})).noise_of("cpu") is None
    assert spec(SimKind(cost=COST)).noise_of("cpu") is None


def test_noise_of_zero_changes_nothing() -> None:
    """Every step is played, and takes the predicted time, so the outcome is that of the closed form."""
    calm, none = played(SimKind(cost=COST, noise=StepNoise())), played(SimKind(cost=COST))
    for drawn, exact in zip(calm, none, strict=True):
        assert drawn.end_s == pytest.approx(exact.end_s, rel=1e-9)
