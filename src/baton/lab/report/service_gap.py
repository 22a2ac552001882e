"""The difference of service between tenants that compete, in weighted tokens, for comparison with the bound of VTC."""

from __future__ import annotations

from collections.abc import Sequence

from baton.lab.report.summary import RequestRecord

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""Weights of prompt and output tokens, as in Fairness in Serving Large Language Models (OSDI 2024)."""


def gap_bound(prompt_tokens_max: int, memory_tokens: int) -> float:
    """Return VTC's bound on the difference of service (theorem 4.4 of the paper), in weighted tokens.

    `memory_tokens`: tokens that the requests in progress can have, in all arenas of the fleet.
    """
    return 2 * max(PROMPT_WEIGHT * prompt_tokens_max, OUTPUT_WEIGHT * memory_tokens)


def largest_gap(records: Sequence[RequestRecord], one: str, other: str) -> float:
    """Return the largest difference of service of two tenants over any period in which both have waiting requests.

    Periods end when one of the tenants gets the first token of its last request, because it then has none waiting. A
    prompt counts as served with its first token.
    """
    until_s = min(_last_start_s(records, tenant) for tenant in (one, other))
    served: list[tuple[float, float]] = []
    for record in records:
        if record.token_times_s and record.tenant in (one, other):
            sign = 1.0 if record.tenant == one else -1.0
            served.append((record.token_times_s[0], sign * PROMPT_WEIGHT * record.input_tokens))
            served += [(at_s, sign * OUTPUT_WEIGHT) for at_s in record.token_times_s]
    difference = lowest = highest = 0.0
    for at_s, weighted in sorted(served):
        if at_s > until_s:
            break
        difference += weighted
        lowest, highest = min(lowest, difference), max(highest, difference)
    return highest - lowest


def _last_start_s(records: Sequence[RequestRecord], tenant: str) -> float:
    return max(record.token_times_s[0] for record in records if record.tenant == tenant and record.token_times_s)
