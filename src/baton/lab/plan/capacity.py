"""Request rate that one worker of a prefill, decode or mixed pool sustains within the SLO.

Waits are closed-form queueing times, for screening. The simulator verifies the best fleets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from baton.core.types import StepShape, prefill_pairs
from baton.decide.cost.roofline import RooflineCost
from baton.decide.policy.predictions import JOIN_STEPS
from baton.lab.plan.demand import WorkloadDemand, weighted_quantile
from baton.lab.plan.options import WorkerOption

STEP_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
"""Step token limits that the search tries, per attention group."""
BUSY_MAX = 0.95
"""Upper bound on planned utilization. Near saturation the formula underestimates queueing."""
BISECTIONS = 13
"""Bisection steps in a search for the largest rate. They narrow the interval to 0.012 %."""
KV_MAX_RATIO = 0.95
"""Share of the arena's tokens that running requests may fill."""
REQUESTS_MAX = 256
"""Largest number of requests that one attention group may run at once. The planner writes no larger batch limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sustained rate of one worker of a pool, and its operating point at that rate."""

    rate_rps: float
    step_tokens_max: int
    requests: float
    """Mean number of requests decoding at once. 0 on a prefill worker."""
    ttft_s: float
    """TTFT at the SLO's attainment ratio. 0 on a decode worker."""
    tpot_s: float
    """TPOT at the SLO's attainment ratio. 0 on a prefill worker."""
    limit: str
    """Description of the first limit that the worker reaches."""


NOTHING = Capacity(rate_rps=0.0, step_tokens_max=0, requests=0.0, ttft_s=0.0, tpot_s=0.0, limit="cannot meet the SLO")


def prompt_s(cost: RooflineCost, *, new: int, cached: int, step_tokens: int) -> float:
    """Return the prefill time of a prompt that runs alone, in chunks of at most `step_tokens`."""
    whole, rest = divmod(new, step_tokens)
    chunks = [step_tokens] * whole + ([rest] if rest else [])
    done = [cached + step_tokens * index for index in range(len(chunks))]
    return sum(cost.prefill_s(new_tokens=n, cached_tokens=c) for n, c in zip(chunks, done, strict=True))


def prefill_capacity(option: WorkerOption, demand: WorkloadDemand, *, workers: int) -> Capacity:
    """Return the capacity of one prefill worker in a pool of `workers`, with its best step token limit."""
    return max((_prefill(option.cost, demand, workers, tokens) for tokens in _limits(option)), key=_rate)


def _limits(option: WorkerOption) -> list[int]:
    """Return the step token limits to try. Each attention group of the worker takes an equal share of a step."""
    return [tokens * option.cost.parallel.dp for tokens in STEP_TOKENS]


def _rate(capacity: Capacity) -> float:
    return capacity.rate_rps


def _prefill(cost: RooflineCost, demand: WorkloadDemand, workers: int, step_tokens: int) -> Capacity:
    weights = [each.weight for each in demand.lengths]
    service_s, batch_s = _together_s(cost, demand, step_tokens)
    times_s = [
        max(batch_s, prompt_s(cost, new=new, cached=each.input_tokens - new, step_tokens=step_tokens))
        for each in demand.lengths
        for new in (demand.new_tokens(each),)
    ]
    service_s = min(_mean(times_s, weights), service_s)

    def met(busy_ratio: float) -> float:
        return _met_ratio(demand, times_s, service_s, workers=workers, busy_ratio=busy_ratio)

    busy = largest(lambda ratio: met(ratio) >= demand.attainment_ratio, BUSY_MAX)
    if busy <= 0:
        return NOTHING
    waiting, scale_s = _wait(demand, times_s, service_s, workers=workers, busy_ratio=busy)
    wait_s = scale_s * max(0.0, math.log(waiting / max(1e-9, 1 - demand.attainment_ratio)))
    slowest_s = weighted_quantile(zip(times_s, weights, strict=True), demand.attainment_ratio)
    limit = "prompts keep it busy" if busy >= BUSY_MAX - 1e-3 else "waiting for a free worker"
    return Capacity(
        rate_rps=busy / service_s, step_tokens_max=step_tokens, requests=0.0,
        ttft_s=min(demand.slo.ttft_s, slowest_s + wait_s), tpot_s=0.0, limit=limit,
    )  # fmt: skip


def _together_s(cost: RooflineCost, demand: WorkloadDemand, step_tokens: int) -> tuple[float, float]:
    """Return the seconds per prompt when short prompts share a step, and the seconds of that shared step.

    The second value is 0 if only one prompt fits a step.
    """
    new = max(1, round(demand.input_tokens * (1 - demand.cached_ratio)))
    count = max(1, step_tokens // new)
    pairs = count * prefill_pairs(new, round(demand.input_tokens) - new)
    step_s = cost.step_s(StepShape(prefill_tokens=count * new, prefill_chunks=count, prefill_pairs=pairs))
    return step_s / count, step_s if count > 1 else 0.0


def decode_capacity(option: WorkerOption, demand: WorkloadDemand, *, workers: int, same_host: bool) -> Capacity:
    """Return the capacity of one decode worker in a pool of `workers`.

    The TPOT of a request includes one handoff and the `JOIN_STEPS` that it waits before it joins the batch.
    """
    cost, context = option.cost, demand.context_tokens
    gaps = max(1.0, demand.output_tokens - 1)
    handoff_s = cost.handoff_s(tokens=round(demand.input_tokens), same_host=same_host)

    def tpot_s(requests: float) -> float:
        step_s = _decode_s(cost, _peak_requests(requests, workers, demand), context)
        return step_s + (handoff_s + JOIN_STEPS * step_s) / gaps

    fitting, full = _fitting(option, demand, workers)
    requests = largest(lambda count: tpot_s(count) <= demand.slo.tpot_s, fitting)
    if requests <= 0:
        return NOTHING
    step_s = _decode_s(cost, requests, context)
    limit = full if requests >= fitting - 1e-2 * fitting else "TPOT"
    return Capacity(
        rate_rps=requests / (demand.output_tokens * step_s), step_tokens_max=512, requests=requests, ttft_s=0.0,
        tpot_s=tpot_s(requests), limit=limit,
    )  # fmt: skip


def mixed_capacity(option: WorkerOption, demand: WorkloadDemand, *, workers: int) -> Capacity:
    """Return the capacity of one worker that runs prompt chunks and decodes in the same steps."""
    best = NOTHING
    for tokens in _limits(option):
        found = mixed_capacity_at(option, demand, workers=workers, step_tokens=tokens, above_rps=best.rate_rps)
        best = max(best, found, key=_rate)
    return best


def mixed_capacity_at(
    option: WorkerOption, demand: WorkloadDemand, *, workers: int, step_tokens: int, above_rps: float = 0.0
) -> Capacity:
    """Return the capacity for one step token limit: the largest rate that keeps TTFT, TPOT and memory in bounds.

    Return `NOTHING` if the worker cannot sustain `above_rps` with this limit. That saves the search for its rate.
    """
    cost, context = option.cost, demand.context_tokens
    new = max(1.0, demand.input_tokens * (1 - demand.cached_ratio))
    fitting, full = _fitting(option, demand, workers)

    def state(rate_rps: float) -> tuple[float, float, float, float]:
        """Return (decoding requests, share of time in steps with a chunk, seconds of such a step, TPOT in seconds).

        The number of decoding requests and the TPOT depend on each other, so this iterates to a fixed point.
        """
        requests, busy, both_s, tpot_s = 1.0, 0.0, 0.0, math.inf
        for _ in range(30):
            chunk = max(1.0, step_tokens - requests)
            both_s = _both_s(cost, demand, _peak_requests(requests, workers, demand), chunk)
            busy = rate_rps * new / chunk * both_s
            alone_s = _decode_s(cost, _peak_requests(requests, workers, demand), context)
            if busy >= 1:
                return requests, busy, both_s, math.inf
            tpot_s = 1 / (rate_rps * new / chunk + (1 - busy) / alone_s)
            tpot_s = alone_s + (tpot_s - alone_s) * _peak_prompts_factor(requests, demand)
            before, requests = requests, rate_rps * demand.output_tokens * tpot_s
            if abs(requests - before) < 3e-3 * before:
                break
            if requests > 4 * fitting:
                return requests, busy, both_s, math.inf
        return requests, busy, both_s, tpot_s

    def holds(rate_rps: float) -> bool:
        requests, busy, both_s, tpot_s = state(rate_rps)
        if busy >= BUSY_MAX or tpot_s > demand.slo.tpot_s or requests > fitting:
            return False
        return _mixed_met(demand, workers, busy, both_s, max(1.0, step_tokens - requests)) >= demand.attainment_ratio

    top_rps = 1 / max(1e-9, prompt_s(cost, new=round(new), cached=0, step_tokens=max(512, step_tokens)) / 2)
    if above_rps > 0 and not holds(above_rps):
        return NOTHING
    while holds(top_rps):  # short prompts share steps, and so take less time than alone
        top_rps *= 2
    rate_rps = largest(holds, max(top_rps, 1e-6))
    if rate_rps <= 0:
        return NOTHING
    requests, _, both_s, tpot_s = state(rate_rps)
    longest = demand.input_quantile(demand.attainment_ratio) * (1 - demand.cached_ratio)
    ttft_s = math.ceil(longest / max(1.0, step_tokens - requests)) * both_s
    more = state(rate_rps * 1.02)
    limit = full if more[0] > fitting else "TPOT" if more[3] > demand.slo.tpot_s else "TTFT beside decode"
    return Capacity(
        rate_rps=rate_rps, step_tokens_max=step_tokens, requests=requests, ttft_s=min(demand.slo.ttft_s, ttft_s),
        tpot_s=tpot_s, limit=limit,
    )  # fmt: skip


def _peak_prompts_factor(requests: float, demand: WorkloadDemand) -> float:
    """Return the factor from the mean number of prompts that arrive during a decode to its quantile.

    The quantile is taken at the SLO's attainment ratio. The mean equals the number of decoding requests (Little's law),
    and the distribution is Poisson.
    """
    return 1 + _peak_deviations(demand) / math.sqrt(max(1.0, requests))


def _mixed_met(demand: WorkloadDemand, workers: int, busy: float, both_s: float, chunk: float) -> float:
    """Return the share of requests that meet the TTFT SLO.

    TTFT consists of the wait for other prompts and the steps of the prompt's own chunks.
    """
    times_s = [math.ceil(demand.new_tokens(each) / chunk) * both_s for each in demand.lengths]
    shared_s = both_s * max(1.0, demand.input_tokens * (1 - demand.cached_ratio)) / chunk
    return _met_ratio(demand, times_s, shared_s, workers=workers, busy_ratio=busy)


def _met_ratio(
    demand: WorkloadDemand, times_s: list[float], service_s: float, *, workers: int, busy_ratio: float
) -> float:
    """Return the share of requests whose wait and own time (`times_s`, by length class) meet the TTFT SLO."""
    waiting, scale_s = _wait(demand, times_s, service_s, workers=workers, busy_ratio=busy_ratio)
    within = [within_ratio(limit_s=demand.slo.ttft_s - s, waiting=waiting, scale_s=scale_s) for s in times_s]
    return _mean(within, [each.weight for each in demand.lengths])


def _wait(
    demand: WorkloadDemand, times_s: list[float], service_s: float, *, workers: int, busy_ratio: float
) -> tuple[float, float]:
    """Return the share of requests that wait, and the mean wait of those in seconds.

    `times_s`: time of a prompt that runs alone, by length class. `service_s`: time per prompt if prompts share steps.
    """
    weights = [each.weight for each in demand.lengths]
    mean_s = _mean(times_s, weights)
    variation = max(0.0, _mean([s * s for s in times_s], weights) / mean_s**2 - 1)
    scale_s = wait_scale_s(
        workers=workers, busy_ratio=busy_ratio, service_s=min(mean_s, service_s), variation=variation
    )
    return waiting_ratio(workers, busy_ratio), scale_s


def waiting_ratio(workers: int, busy_ratio: float) -> float:
    """Return the share of Poisson arrivals that find all workers busy (Erlang C)."""
    if busy_ratio >= 1:
        return 1.0
    load = workers * busy_ratio
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - busy_ratio * (1 - blocked))


def wait_scale_s(*, workers: int, busy_ratio: float, service_s: float, variation: float) -> float:
    """Return the mean wait of requests that wait. `variation`: squared coefficient of variation of the service time.

    Source: Allen-Cunneen approximation for M/G/k, which for one worker is the Pollaczek-Khinchine formula.
    """
    return service_s * (1 + variation) / 2 / (workers * (1 - busy_ratio))


def within_ratio(*, limit_s: float, waiting: float, scale_s: float) -> float:
    """Return the share of arrivals that wait at most `limit_s`, if waits are exponentially distributed."""
    if limit_s < 0:
        return 0.0
    return 1 - waiting * math.exp(-limit_s / scale_s) if scale_s > 0 else 1.0


def _both_s(cost: RooflineCost, demand: WorkloadDemand, requests: float, chunk: float) -> float:
    """Return the time of a step with one chunk and `requests` decodes.

    The chunk starts at the mean position within its prompt. A chunk longer than a prompt holds several prompts.
    """
    tokens = max(1, round(chunk))
    new = max(1.0, demand.input_tokens * (1 - demand.cached_ratio))
    before = max(0.0, demand.input_tokens - new) + max(0.0, new - tokens) / 2
    chunks = max(1, round(tokens / new))
    pairs = (
        chunks * prefill_pairs(tokens // chunks, round(before)) if chunks > 1 else prefill_pairs(tokens, round(before))
    )
    decoding = max(0, round(requests))
    shape = StepShape(
        prefill_tokens=tokens, prefill_chunks=chunks, prefill_pairs=pairs, decode_requests=decoding,
        context_tokens=round(decoding * demand.context_tokens),
    )  # fmt: skip
    return cost.step_s(shape)


def _decode_s(cost: RooflineCost, requests: float, context: float) -> float:
    """Return the time of a decode step, interpolated between whole numbers of requests."""
    low = max(1, math.floor(requests))
    low_s = cost.step_s(StepShape(decode_requests=low, context_tokens=round(low * context)))
    if requests <= low:
        return low_s
    high_s = cost.step_s(StepShape(decode_requests=low + 1, context_tokens=round((low + 1) * context)))
    return low_s + (high_s - low_s) * (requests - low)


def _peak_requests(requests: float, workers: int, demand: WorkloadDemand) -> float:
    """Return the requests on a worker at the wanted quantile, for a mean of `requests`.

    The number of requests in a pool is Poisson, and the router spreads them evenly over its workers.
    """
    return requests + _peak_deviations(demand) * math.sqrt(requests / workers)


def _peak_deviations(demand: WorkloadDemand) -> float:
    """Return the standard deviations from the mean to the wanted quantile, at least 0."""
    return max(0.0, NormalDist().inv_cdf(demand.attainment_ratio))


def requests_max(option: WorkerOption) -> int:
    """Return the largest number of requests that a worker may run at once."""
    return REQUESTS_MAX * option.cost.parallel.dp


def _fitting(option: WorkerOption, demand: WorkloadDemand, workers: int) -> tuple[float, str]:
    """Return the largest mean number of decoding requests that leaves room for peaks, and the name of its limit."""
    held = KV_MAX_RATIO * option.facts.kv_tokens_max / (demand.context_tokens + demand.output_tokens / 2)
    most, full = min((held, "KV memory"), (requests_max(option), "requests at once"))
    return largest(lambda count: _peak_requests(count, workers, demand) <= most, most), full


def largest(holds: Callable[[float], bool], top: float) -> float:
    """Return the largest value up to `top` for which `holds` is true, or 0. `holds` must be monotonic."""
    if top <= 0:
        return 0.0
    if holds(top):
        return top
    low, high = 0.0, top
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _mean(values: list[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
