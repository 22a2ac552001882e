"""Answers that ended before those of the trace did: how long a simulated client asks for, and what was cut off."""

from __future__ import annotations

from collections.abc import Sequence

from baton.lab.report.summary import RequestRecord
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace

USUAL_TOKENS_MAX = 4096
"""What a client asks for at most, where neither the cluster nor the trace says more."""


def asked_tokens_max(spec: ClusterSpec, trace: Trace) -> int:
    """Say how many output tokens every client asks for at most: what the cluster says, otherwise enough for all.

    It is one number for all that a server gets, so that no policy can tell a short answer from a long one.
    """
    if spec.output_tokens_max is not None:
        return spec.output_tokens_max
    return max(USUAL_TOKENS_MAX, max((request.output_tokens for request in trace.requests), default=0))


def describe_cut_answers(records: Sequence[RequestRecord], spec: ClusterSpec) -> list[str]:
    """Say how many answers were cut and by how much, and what to change. Empty where every answer came whole."""
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
