"""Truncated answers: the output limit of simulated requests, and a report of answers shorter than in the trace."""

from __future__ import annotations

from collections.abc import Sequence

from baton.lab.report.summary import RequestRecord
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace

USUAL_TOKENS_MAX = 4096
"""Output limit of a request, unless the cluster sets another or the trace has longer answers."""


def asked_tokens_max(spec: ClusterSpec, trace: Trace) -> int:
    """Return the output limit that every request asks for: the cluster's, otherwise enough for the longest answer.

    All requests have the same limit, so that no policy can tell a short answer from a long one.
    """
    if spec.output_tokens_max is not None:
        return spec.output_tokens_max
    return max(USUAL_TOKENS_MAX, max((request.output_tokens for request in trace.requests), default=0))


def describe_cut_answers(records: Sequence[RequestRecord], spec: ClusterSpec) -> list[str]:
    """Return lines that count the truncated answers by cause and the missing tokens. Empty if no answer was cut."""
    cut = [record for record in records if record.cut_tokens]
    if not cut:
        return []
    full = [record for record in cut if record.input_tokens + record.output_tokens >= spec.request_tokens_max]
    asked = len(cut) - len(full)
    words: list[str] = []
    if asked:
        words.append(
            f"{_share(asked, records)} end at output_tokens_max = {spec.output_tokens_max} of the cluster file"
        )
    if full:
        room = f"the KV of a host ({spec.request_tokens_max} tokens, prompt included)"
        words.append(f"{_share(len(full), records)} fill {room}: raise kv.blocks")
    lost, had = sum(record.cut_tokens for record in cut), sum(r.output_tokens + r.cut_tokens for r in records)
    return [*words, f"{lost} of {had} output tokens of the trace were not generated"]


def _share(count: int, records: Sequence[RequestRecord]) -> str:
    return f"{count} of {len(records)} answers"
