"""Conversations on two hosts: the first turn is prefilled on one, later turns stay on the one that decodes."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from baton.core.config import Plugin
from baton.core.messages import StartPrefill
from baton.decide.control.decision_log import Decision
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimCost, SimKind, SimKV, SimWorkers
from baton.lab.workload.request import Trace, TraceRequest

COST = SimCost(handoff_token_s=0.0005)
SPEC = ClusterSpec(
    workers=(SimWorkers(role="prefill", host="a", kind="small"), SimWorkers(role="decode", host="b")),
    kinds={"small": SimKind(cost=asdict(COST), kv=SimKV(blocks=64))},
    cost=COST,
)
"""The arena of the prefill worker has no room for all conversations, that of the decode worker has."""


def chats() -> Trace:
    """Four chats of four turns. A turn adds 60 tokens to the prompt, after an answer of 40."""
    return Trace(
        format="test",
        timing="session",
        requests=tuple(
            TraceRequest(
                at_s=2.0 * chat,
                input_tokens=400 + 100 * turn,
                output_tokens=40,
                session=f"chat {chat}",
                turn=turn,
                think_s=1.0 if turn else None,
            )
            for chat in range(4)
            for turn in range(4)
        ),
    )


def played(*, pins: bool) -> tuple[list[str], float]:
    """Return the host of the prefill worker of each later turn, and the mean TTFT of these turns."""
    use = Plugin(use="slo-headroom", options={"pins_turns": pins})
    policy = replace(policy_set("baton"), admission=use, routing=use, placement=use)
    prompts: dict[str, str] = {}

    def tap(decision: Decision) -> None:
        starts = [command for command in decision.commands if isinstance(command, StartPrefill)]
        prompts.update({start.request.id: start.worker for start in starts if start.request.prompt_tokens > 400})

    records = replay_trace(SPEC, chats(), policy=policy, seed=0, tap=tap)
    assert all(record.outcome == "finished" for record in records)
    later = [record.ttft_s or 0.0 for record in records if record.input_tokens > 400]
    assert len(later) == len(prompts) == 12
    return sorted(prompts.values()), sum(later) / len(later)


def test_later_turns_are_computed_where_the_answers_before_them_were_decoded() -> None:
    moved, late_s = played(pins=False)
    pinned, ttft_s = played(pins=True)
    assert moved == ["prefill-0"] * 12
    assert pinned.count("decode-0") >= 6, "the others are predicted to be earlier on the prefill worker"
    assert ttft_s < 0.8 * late_s
