"""The risk that a request misses its SLO, from predicted latencies and the errors of recent predictions."""

from __future__ import annotations

from math import erfc, exp, log, sqrt
from typing import NamedTuple

from baton.core.types import ClusterView, ErrorBar, Prediction, Role, Slo
from baton.decide.policy.admission import Reject

TRIED_MIN = 8.0
"""Minimum number of recent requests before their errors may refuse a request that an idle worker could take."""
_TIME_S_MIN = 1e-9
RETRY_S_MIN = 1.0


class MissRatios(NamedTuple):
    """Probabilities to miss the SLO of each latency."""

    ttft_ratio: float
    tpot_ratio: float


def miss_ratio(predicted_s: float, slo_s: float, bar: ErrorBar, alone_s: float = 0.0) -> float:
    """Return the probability that a latency exceeds its SLO. `alone_s`: the latency on an idle worker.

    Errors come from the load, so they change the part of the prediction above `alone_s` only. Without this rule, the
    errors of a burst would refuse requests that find an idle fleet.
    """
    alone_s = min(alone_s, predicted_s)
    load_s = predicted_s - alone_s
    expected_s = alone_s + load_s * exp(bar.bias_log + bar.margin_log)
    over_log, spread_log = log(max(_TIME_S_MIN, expected_s) / slo_s), bar.spread_log
    if predicted_s > 0.0:
        spread_log *= load_s / predicted_s
    if spread_log == 0.0:
        return 1.0 if over_log > 0 else 0.0
    return 0.5 * erfc(-over_log / (spread_log * sqrt(2.0)))


def refuse_risky(
    slo: Slo,
    predicted: Prediction,
    cluster: ClusterView,
    *,
    alone: Prediction,
    miss_ratios_max: MissRatios,
    answer_s: float,
) -> Reject | None:
    """Return a rejection if the request misses an SLO with a probability above its maximum, else None.

    `alone`: the latencies on an idle worker.
    An idle cluster takes every request. So does an idle worker while fewer than `TRIED_MIN` requests were observed:
    only observed requests can correct a wrong prediction. `answer_s`: predicted duration of an answer, in which the
    decode load drains.
    """
    if not any(worker.running_requests for worker in cluster.workers):
        return None
    errors = cluster.errors
    late_ratio = miss_ratio(predicted.ttft_s, slo.ttft_s, errors.ttft, alone.ttft_s)
    if late_ratio > miss_ratios_max.ttft_ratio and not _is_untried(cluster, "prefill", errors.ttft):
        high_s = _high_s(predicted.ttft_s, errors.ttft)
        reason = f"the first token is predicted after {predicted.ttft_s:.3f} s, {_against(high_s, slo.ttft_s)}"
        retry_s = max(predicted.ttft_s, high_s) - slo.ttft_s
        return _rejection(reason, late_ratio, retry_s)
    slow_ratio = miss_ratio(predicted.tpot_s, slo.tpot_s, errors.tpot, alone.tpot_s)
    if slow_ratio > miss_ratios_max.tpot_ratio and not _is_untried(cluster, "decode", errors.tpot):
        high_s = _high_s(predicted.tpot_s, errors.tpot)
        reason = f"a token is predicted every {predicted.tpot_s:.4f} s, {_against(high_s, slo.tpot_s)}"
        retry_s = answer_s * max(0.0, 1.0 - slo.tpot_s / max(predicted.tpot_s, high_s))
        return _rejection(reason, slow_ratio, retry_s)
    return None


def _is_untried(cluster: ClusterView, role: Role, bar: ErrorBar) -> bool:
    return bar.requests < TRIED_MIN and any(not worker.running_requests for worker in cluster.having(role))


def _high_s(predicted_s: float, bar: ErrorBar) -> float:
    """Return the upper end of the error bar."""
    return predicted_s * exp(bar.bias_log + bar.spread_log)


def _against(high_s: float, slo_s: float) -> str:
    return f"by recent errors up to {high_s:.4g} s, and the SLO is {slo_s:.4g} s"


def _rejection(reason: str, ratio: float, retry_s: float) -> Reject:
    why = f"{reason}: it would be missed with a probability of {ratio:.0%}; send the request later, or relax its SLO"
    return Reject(reject="slo", reason=why, retry_after_s=max(RETRY_S_MIN, retry_s))
