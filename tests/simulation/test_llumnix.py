"""Llumnix in a cluster: requests do move from a crowded worker to a free one, and end with all their tokens."""

from __future__ import annotations

from baton.core.messages import StartDecode, StopRequest
from baton.core.types import RequestId
from baton.decide.control.decision_log import Decision
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import load_spec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = load_spec(
    "tick_s = 0.2\nworkers = [{role = 'mixed', count = 4, host = 'each'}]\n[kv]\nblocks = 100\n"
    "[batch]\nstep_tokens_max = 512"
)


def test_requests_move_when_their_worker_is_crowded() -> None:
    """Every third answer is long, so that KV of 1,600 tokens for each worker gets scarce where several of them meet."""
    requests = tuple(
        TraceRequest(at_s=0.7 * place, input_tokens=200, output_tokens=400 if place * place % 3 == 1 else 5)
        for place in range(60)
    )
    stopped: set[RequestId] = set()
    moved: set[RequestId] = set()

    def tap(decision: Decision) -> None:
        stopped.update(command.request_id for command in decision.commands if isinstance(command, StopRequest))
        moved.update(
            command.request.id
            for command in decision.commands
            if isinstance(command, StartDecode) and command.request.id in stopped
        )

    trace = Trace(format="made", timing="absolute", requests=requests)
    records = replay_trace(SPEC, trace, policy="llumnix", seed=0, tap=tap)
    assert moved
    assert [record.outcome for record in records] == ["finished"] * len(requests)
    assert sum(record.output_tokens for record in records) == sum(request.output_tokens for request in requests)
