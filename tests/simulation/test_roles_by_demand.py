"""Roles that adapt, in a whole cluster of two workers: the one without work helps the other one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.config import Plugin, Topology
from baton.core.messages import SetRole
from baton.decide.control.decision_log import Decision
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = ClusterSpec(topology=Topology(prefill=1, decode=1))


def played(roles: str, prompt_tokens: int, output_tokens: int, gap_s: float) -> tuple[float, list[SetRole]]:
    """Play a minute of equal requests. Return when the last one ended, and the changes of roles."""
    requests = tuple(
        TraceRequest(at_s=gap_s * number, input_tokens=prompt_tokens, output_tokens=output_tokens)
        for number in range(int(60 / gap_s))
    )
    flips: list[SetRole] = []

    def tap(decision: Decision) -> None:
        flips.extend(command for command in decision.commands if isinstance(command, SetRole))

    policy = replace(policy_set("baton"), roles=Plugin(use=roles))
    trace = Trace(format="test", timing="absolute", requests=requests)
    records = replay_trace(SPEC, trace, policy=policy, seed=0, tap=tap)
    assert all(record.outcome == "finished" for record in records)
    return max(record.end_s for record in records), flips


@pytest.mark.parametrize(
    ("load", "mixed"),
    [
        ((800, 4, 1.0), "decode-0"),
        ((40, 200, 0.8), "prefill-0"),
    ],
    ids=["prompts", "answers"],
)
def test_an_overloaded_phase_gets_the_worker_of_the_other_one(load: tuple[int, int, float], mixed: str) -> None:
    static_s, none = played("static-roles", *load)
    adaptive_s, flips = played("demand-roles", *load)
    assert none == []
    assert (flips[0].worker, flips[0].role) == (mixed, "mixed")
    assert adaptive_s - 60 < 0.6 * (static_s - 60), "the backlog after the last arrival"
