"""The edge between a client and the deciding half: what it takes, the client sees."""

from __future__ import annotations

import tracemalloc

import pytest
from msgspec.structs import replace

from baton.core.errors import ConfigError
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimEdge, load_spec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = ClusterSpec()
EDGE = SimEdge(request_s=0.05, prompt_token_s=0.001, token_s=0.02)


def trace(*, think_s: float | None = None) -> Trace:
    first = TraceRequest(at_s=1.0, input_tokens=40, output_tokens=5, session="a")
    second = TraceRequest(at_s=1.0, input_tokens=60, output_tokens=5, session="a", turn=1, think_s=think_s)
    return Trace(format="made", timing="absolute", requests=(first, second) if think_s is not None else (first,))


def test_a_client_waits_for_the_edge_on_both_sides() -> None:
    (plain,) = replay_trace(SPEC, trace(), policy="baton", seed=0)
    (behind,) = replay_trace(replace(SPEC, edge=EDGE), trace(), policy="baton", seed=0)
    assert behind.arrival_s == pytest.approx(1.0)
    assert behind.ttft_s == pytest.approx((plain.ttft_s or 0.0) + 0.05 + 40 * 0.001 + 0.02)
    assert behind.tpot_s == pytest.approx(plain.tpot_s)
    assert behind.end_s == pytest.approx(plain.end_s + 0.05 + 40 * 0.001 + 0.02)


def test_a_reader_thinks_once_the_answer_has_come_through_the_edge() -> None:
    first, second = replay_trace(replace(SPEC, edge=EDGE), trace(think_s=2.0), policy="baton", seed=0)
    assert second.arrival_s == pytest.approx(first.end_s + 2.0)


def test_turns_that_wait_for_an_answer_that_never_comes_are_counted() -> None:
    """Or a policy that rejects would look better by all that its victims would have asked later."""
    first, second = trace(think_s=2.0).requests
    third = replace(second, turn=2, input_tokens=80)
    large = replace(first, input_tokens=SPEC.request_tokens_max + 1)
    lost = replace(trace(), requests=(large, second, third))
    assert [record.outcome for record in replay_trace(SPEC, lost, policy="baton", seed=0)] == ["rejected"] * 3
    full = replace(SPEC, queue_requests_max=1)
    busy = replace(trace(), requests=(replace(first, session="other", output_tokens=50), first, second, third))
    outcomes = [record.outcome for record in replay_trace(full, busy, policy="baton", seed=0)]
    assert sorted(outcomes) == ["finished", "rejected", "rejected", "rejected"]


def test_an_edge_takes_no_negative_time() -> None:
    with pytest.raises(ConfigError, match=r"edge.token_s is -1, but must be at least 0 and finite"):
        load_spec("[edge]\ntoken_s = -1.0\n")


@pytest.mark.parametrize("think_s", [None, 1.0])
def test_a_prompt_that_no_host_can_hold_is_refused_before_it_is_made(think_s: float | None) -> None:
    """Alone or as a later turn: a hundred million tokens would take 400 MB, however they are kept."""
    *before, last = trace(think_s=think_s).requests
    absurd = replace(last, input_tokens=100_000_000)
    tracemalloc.start()
    records = replay_trace(
        SPEC, Trace(format="made", timing="absolute", requests=(*before, absurd)), policy="baton", seed=0
    )
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [record.outcome for record in records] == ["finished"] * len(before) + ["rejected"]
    assert peak_bytes < 100e6
