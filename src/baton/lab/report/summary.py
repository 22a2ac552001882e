"""Summarize the request records of a run, in one schema for `baton bench` and `baton sim`.

Definitions, so that two runs can be compared:
- TTFT, ITL, TPOT and E2E cover completed requests only. They start when the request is sent (bench) or arrives
  (simulator). A request with one output token has no TPOT, and meets any TPOT target.
- p50, p90 and p99 interpolate linearly between the two nearest ranks (NumPy's default). ITL covers all gaps of all
  requests together; it is not a mean of per-request means.
- duration_s runs from the first arrival to the last end of any request. Rates count completed requests over it.
- A request attains the SLO if it completes and meets every target: its own, or the run's if it has none. Failed and
  rejected requests miss it. Cancelled requests count in `requests` only.
- prefix_hit_ratio covers completed requests whose server reports cached tokens.
- An unknown value is null, never NaN: there was no request, no target, or no report of cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.core.messages import Outcome, RejectReason
from baton.core.types import Slo


class RequestRecord(Struct, frozen=True, kw_only=True, gc=False):
    """Outcome and times of one request. All times are on one clock.

    A struct, not a frozen dataclass: a simulation creates one per request, and a dataclass takes several times as long.
    """

    arrival_s: float
    end_s: float
    """Time at which the request was closed, whatever the outcome."""
    outcome: Outcome
    reject: RejectReason | None = None
    """Reason of a rejection. None: not rejected, or unknown."""
    failure: str = ""
    """Reason of a failure. Empty: not failed, or unknown."""
    input_tokens: int
    token_times_s: Sequence[float] = ()
    """Time of each output token, ascending. Empty if the request produced none before it ended."""
    cached_tokens: int | None = None
    """Input tokens that needed no prefill. None: the server does not report it."""
    cut_tokens: int = 0
    """Output tokens of the trace that were not requested, because the request's output limit was lower."""
    slo: Slo | None = None
    """SLO of this request. None: the targets of the run apply."""
    tenant: str = ""
    """Tenant of the client."""

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        times_s = self.token_times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None


class Distribution(Struct, frozen=True, kw_only=True):
    """Mean and quantiles in seconds. Null: nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class SloTargets(Struct, frozen=True, kw_only=True):
    """SLO targets of a run. None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether a request finished within its own targets, or within these if it has none."""
        if record.outcome != "finished":
            return False
        targets = self if record.slo is None else record.slo
        ttft_s, tpot_s = record.ttft_s, record.tpot_s
        late = targets.ttft_s is not None and ttft_s is not None and ttft_s > targets.ttft_s
        slow = targets.tpot_s is not None and tpot_s is not None and tpot_s > targets.tpot_s
        return not late and not slow


class SloResult(Struct, frozen=True, kw_only=True):
    ttft_s: float | None
    tpot_s: float | None
    attainment_ratio: float | None


class Results(Struct, frozen=True, kw_only=True):
    """Results JSON of `baton bench` and `baton sim`. Its keys are a public contract."""

    requests: int
    completed: int
    failed: int
    rejected: int
    duration_s: float | None
    requests_per_s: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    slo: SloResult
    goodput_rps: float | None
    """Requests per second that met every target. Null: no target was given."""
    prefix_hit_ratio: float | None
    wall_s: float
    """Real time that the run or simulation took, including warm-up."""


def summarize(records: Sequence[RequestRecord], *, slo: SloTargets, wall_s: float) -> Results:
    """Return the results of a run from its records, in any order."""
    completed = [record for record in records if record.outcome == "finished"]
    duration_s = _duration_s(records)
    attained = sum(slo.met_by(record) for record in completed)
    gaps_s = token_gaps_s(completed)
    gaps_s.sort()  # in place: a million requests have gigabytes of gaps
    promised = slo.given or any(record.slo is not None for record in records)
    judged = sum(record.outcome != "cancelled" for record in records)
    return Results(
        requests=len(records),
        completed=len(completed),
        failed=sum(record.outcome == "failed" for record in records),
        rejected=sum(record.outcome == "rejected" for record in records),
        duration_s=duration_s,
        requests_per_s=_ratio(len(completed), duration_s),
        input_tokens_per_s=_ratio(sum(record.input_tokens for record in completed), duration_s),
        output_tokens_per_s=_ratio(sum(record.output_tokens for record in completed), duration_s),
        ttft_s=distribution([value for record in completed if (value := record.ttft_s) is not None]),
        tpot_s=distribution([value for record in completed if (value := record.tpot_s) is not None]),
        itl_s=_of_sorted(gaps_s),
        e2e_s=distribution([value for record in completed if (value := record.e2e_s) is not None]),
        slo=SloResult(
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            attainment_ratio=_ratio(attained, judged) if promised else None,
        ),
        goodput_rps=_ratio(attained, duration_s) if promised else None,
        prefix_hit_ratio=_prefix_hit_ratio(completed),
        wall_s=wall_s,
    )


def distribution(values: Sequence[float] | npt.NDArray[np.float64]) -> Distribution:
    """Return mean and quantiles, all null without values."""
    return _of_sorted(np.sort(np.asarray(values, np.float64)))


def _of_sorted(ordered: npt.NDArray[np.float64]) -> Distribution:
    """Return mean and quantiles of ascending values. May overwrite them.

    Sorting makes the floating-point mean independent of the order of the records.
    """
    if not len(ordered):
        return Distribution()
    mean = float(ordered.mean())
    p50, p90, p99 = np.quantile(ordered, (0.5, 0.9, 0.99), overwrite_input=True).tolist()
    return Distribution(mean=mean, p50=p50, p90=p90, p99=p99)


def token_gaps_s(records: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """Return every gap between two tokens of a request: [gaps]."""
    gaps = np.empty(sum(max(0, len(record.token_times_s) - 1) for record in records), np.float64)
    begin = 0
    for record in records:  # one array, because a large simulation has hundreds of millions of gaps
        own = np.diff(np.asarray(record.token_times_s, np.float64))
        gaps[begin : begin + len(own)] = own
        begin += len(own)
    return gaps


def _duration_s(records: Sequence[RequestRecord]) -> float | None:
    if not records:
        return None
    return max(record.end_s for record in records) - min(record.arrival_s for record in records)


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _prefix_hit_ratio(completed: Sequence[RequestRecord]) -> float | None:
    told = [(record.cached_tokens, record.input_tokens) for record in completed if record.cached_tokens is not None]
    return _ratio(sum(cached for cached, _ in told), sum(tokens for _, tokens in told))
