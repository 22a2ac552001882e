"""A slow prefill worker beside a fast one takes prompts that it computes in time while the fast one is busy."""

from __future__ import annotations

from statistics import mean

from msgspec.structs import replace

from baton.core.messages import StartPrefill
from baton.core.types import Slo, WorkerId
from baton.decide.control.decision_log import Decision
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import SloTargets
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, SimWorkers
from baton.lab.workload.request import Trace, TraceRequest

SLO = Slo(ttft_s=0.5, tpot_s=0.1)
GPU, CPU = WorkerId("prefill-0"), WorkerId("prefill-1")
SPEC = ClusterSpec(
    kinds={
        "gpu": SimKind(cost={"step_overhead_s": 0.01, "prefill_token_s": 0.0001, "prefill_pair_s": 0.0}),
        "cpu": SimKind(cost={"step_overhead_s": 0.02, "prefill_token_s": 0.002, "prefill_pair_s": 0.0}),
    },
    workers=(
        SimWorkers(role="prefill", count=1, kind="gpu"),
        SimWorkers(role="prefill", count=1, kind="cpu"),
        SimWorkers(role="decode", count=1, kind="gpu"),
    ),
)
SHORT, LONG = 100, 2000
"""Tokens of the prompts: 0.2 s on the CPU, or 4 s, where the GPU takes 0.02 or 0.21 s."""


def played(spec: ClusterSpec) -> tuple[float, dict[WorkerId, list[int]]]:
    """Return the attainment of the SLO, and the lengths of the prompts of each worker."""
    requests = tuple(
        TraceRequest(at_s=0.05 * number, input_tokens=LONG if number % 2 else SHORT, output_tokens=4)
        for number in range(300)
    )
    lengths: dict[WorkerId, list[int]] = {}

    def tap(decision: Decision) -> None:
        for command in decision.commands:
            if isinstance(command, StartPrefill):
                lengths.setdefault(command.worker, []).append(command.request.prompt_tokens)

    trace = Trace(format="test", timing="absolute", requests=requests)
    records = replay_trace(spec, trace, policy=policy_set("baton"), seed=0, slo=SLO, tap=tap)
    targets = SloTargets(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s)
    return mean(targets.met_by(record) for record in records), lengths


def test_a_cpu_worker_takes_short_prompts_beside_a_gpu() -> None:
    attained, lengths = played(SPEC)
    alone, _ = played(replace(SPEC, workers=(SPEC.workers[0], SPEC.workers[2])))
    assert lengths[CPU], "the CPU is used"
    assert set(lengths[CPU]) == {SHORT}, "a long prompt would take 4 s there"
    assert attained > alone - 0.02, "a slow worker does not cost requests their SLO"
