"""Several hosts, one situation a test: KV that lands, wires that break, hosts that die, requests that move."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import asdict, replace

from baton.core.copies import LandingEnded, LandingWanted
from baton.core.messages import (
    BlocksStored,
    HostLost,
    RetireWorker,
    StartDecode,
    StartPrefill,
    StartWorker,
    StopRequest,
    WorkerLost,
)
from baton.core.types import HostId, RequestId, WorkerId, WorkerView
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import ClusterCommand, ClusterEvent, HostAdded, PoolDecision
from baton.decide.kv.hashing import block_hashes
from baton.decide.kv.window import Window
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.build import build_cluster
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.engines import LengthEngine
from baton.lab.sim.fault_injector import delay_messages
from baton.lab.sim.faults import Death, HostKill, HostLeave, Kill, WireCut
from baton.lab.sim.journal import Journal
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, SimKV, SimWorkers, load_spec
from baton.lab.workload.request import Trace, TraceRequest
from tests.campaign.play import play, prepare_play
from tests.campaign.scenario import RESTLESS, PlannedRequest, Scenario
from tests.campaign.triggers import Cancel, Fault
from tests.simulation.test_behaviour import outcome, request, scenario

A, B = HostId("a"), HostId("b")


def two_hosts(*requests: PlannedRequest, faults: tuple[Fault, ...] = (), policy: str = "distserve") -> Scenario:
    """A host that prefills and a host that decodes; copying a token's KV takes 1 ms."""
    made = scenario(*requests, faults=faults)
    workers = (SimWorkers(role="prefill", host=A), SimWorkers(role="decode", host=B))
    cost = replace(made.cluster.cost, handoff_local_s=0.001, handoff_token_s=0.001)
    return replace(made, cluster=replace(made.cluster, workers=workers, cost=cost), policy=policy)


def landings(cluster: SimCluster) -> list[LandingEnded]:
    told = [entry.event for entry in cluster.server.journal.log if isinstance(entry, PoolDecision)]
    return [event for event in told if isinstance(event, LandingEnded)]


def test_decode_goes_on_where_prefill_stopped_on_another_host() -> None:
    """The prompt's KV comes over, its unsealed tail too: not one token of it is computed again."""
    cluster = play(two_hosts(request("r", tokens=14)))
    assert [event.computed_tokens for event in landings(cluster)] == [14]
    assert (cluster.wires.copies, cluster.wires.tokens) == (1, 14)
    decode = cluster.worker(WorkerId("decode-0"))
    assert decode is not None
    assert decode.steps == 7  # 8 tokens, of which prefill made the first


def test_of_a_model_that_sees_a_window_the_visible_tail_comes_over() -> None:
    """Of 30 tokens the last 8 are seen: blocks of four from token 20 on, and nothing was sent ahead of that either."""
    made = two_hosts(request("r", tokens=30))
    made = replace(made, cluster=replace(made.cluster, window=Window(tokens=8, step_tokens=4)))
    cluster = play(made)
    assert [event.computed_tokens for event in landings(cluster)] == [30]
    assert (cluster.wires.copies, cluster.wires.tokens) == (1, 10)
    decode = cluster.worker(WorkerId("decode-0"))
    assert decode is not None
    assert decode.steps == 7


def test_a_source_that_has_let_go_too_much_is_not_read() -> None:
    """It lets go at every block of four, the target has blocks of eight: what it begins with is gone."""
    made = two_hosts(request("r", tokens=30))
    large = SimKind(cost={"model": "linear", **asdict(made.cluster.cost)}, kv=SimKV(blocks=32, block_tokens=8))
    workers = (SimWorkers(role="prefill", host=A), SimWorkers(role="decode", host=B, kind="large"))
    window = Window(tokens=8, step_tokens=4)
    made = replace(made, cluster=replace(made.cluster, window=window, workers=workers, kinds={"large": large}))
    cluster = play(made)
    assert (cluster.wires.copies, cluster.wires.tokens) == (0, 0)
    assert [event.computed_tokens for event in landings(cluster)] == [16]
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_what_is_there_already_does_not_come_over() -> None:
    """Turn two of a chat: decode's host holds turn one, so only the blocks behind it are copied."""
    cluster = play(two_hosts(request("a"), request("b", tokens=6, at_s=0.1, follows="a")))
    first, second = landings(cluster)
    assert (first.computed_tokens, second.computed_tokens) == (12, 26)
    assert cluster.wires.tokens == 12 + 26 - 16  # of turn two's 26, four blocks of four were there


def test_a_broken_wire_costs_a_recompute_and_no_token() -> None:
    cluster = play(two_hosts(request("r", tokens=14), faults=(WireCut(one=A, other=B, at_s=0.0, for_s=9.0),)))
    assert [event.computed_tokens for event in landings(cluster)] == [0]
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_a_wire_that_breaks_under_a_copy_frees_both_ends() -> None:
    """INV-2 and INV-4 are checked at the end, on both hosts."""
    cut = WireCut(one=A, other=B, at_s=0.05, for_s=0.1)
    cluster = play(two_hosts(*(request(name, tokens=30) for name in "rst"), faults=(cut,)))
    assert any(event.computed_tokens == 0 for event in landings(cluster))


def test_a_decode_host_that_dies_loses_no_token() -> None:
    """Its KV is gone; the server has the tokens, and prefill's host goes on with them."""
    kill = HostKill(host=B, at_s=0.1, notice_s=0.01, restart_s=0.5)
    cluster = play(two_hosts(request("r", output=30), faults=(kill,)))
    life = cluster.server.journal.lives[RequestId("r")]
    assert (outcome(life), life.attempt) == ("finished", 2)


def test_a_source_that_dies_while_it_sends_is_not_waited_for() -> None:
    kill = HostKill(host=A, at_s=0.045, notice_s=0.001, restart_s=5.0)
    cluster = play(two_hosts(request("r", tokens=30), faults=(kill,)))
    assert [event.computed_tokens for event in landings(cluster)] == [0]
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_a_target_that_dies_while_it_receives_leaves_the_kv_where_it_was() -> None:
    """The source keeps its blocks until they have landed: the next attempt goes on from them."""
    kill = Kill(worker=WorkerId("decode-0"), at_s=0.06, death=Death(restart_s=5.0))
    cluster = play(two_hosts(request("r", tokens=30), faults=(kill,)))
    life = cluster.server.journal.lives[RequestId("r")]
    starts = [command for entry in cluster.server.journal.decisions() for command in entry.commands]
    workers = [command.worker for command in starts if isinstance(command, StartDecode)]
    assert workers == ["decode-0", "prefill-0"]
    assert (outcome(life), life.attempt) == ("finished", 2)
    prefill = cluster.worker(WorkerId("prefill-0"))
    assert prefill is not None
    assert prefill.steps == 1 + 7  # the prompt once, and seven tokens: nothing is computed again


def test_a_client_that_hangs_up_during_the_copy_frees_both_ends() -> None:
    cancel = Cancel(request_id=RequestId("r"), stage="handed_off", delay_s=0.005)
    cluster = play(two_hosts(request("r", tokens=30), faults=(cancel,)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "cancelled"
    assert all(pool.view().blocks_used == 0 for pool in cluster.server.pools.values())


def test_a_request_moves_while_it_decodes() -> None:
    """Restless policies move it at ticks: it stops, its KV comes over with the tail, it goes on with the next token."""
    made = two_hosts(request("q", output=60), request("r", output=60), policy=RESTLESS)
    cluster = play(replace(made, cluster=replace(made.cluster, tick_s=0.05)))
    stops = [
        command
        for entry in cluster.server.journal.decisions()
        for command in entry.commands
        if isinstance(command, StopRequest)
    ]
    wanted = [entry.event for entry in cluster.server.journal.log if isinstance(entry, PoolDecision)]
    assert len(stops) >= 2
    assert sum(isinstance(event, LandingWanted) for event in wanted) >= 2
    assert {outcome(life) for life in cluster.server.journal.lives.values()} == {"finished"}


def test_a_request_on_a_mixed_worker_moves_as_one_that_was_handed_off() -> None:
    """Nobody told it to stop at its first token; from that on it goes where the policy wants it."""
    made = two_hosts(request("q", output=60), request("r", output=60), policy=RESTLESS)
    workers = (SimWorkers(role="mixed", host=A), SimWorkers(role="mixed", host=B))
    cluster = play(replace(made, cluster=replace(made.cluster, workers=workers, tick_s=0.05)))
    commands = [command for entry in cluster.server.journal.decisions() for command in entry.commands]
    assert {command.until for command in commands if isinstance(command, StartPrefill)} == {"end"}
    moves = [command for command in commands if isinstance(command, StartDecode)]
    assert {command.request.id for command in moves} == {"q", "r"}
    assert {outcome(life) for life in cluster.server.journal.lives.values()} == {"finished"}


def test_two_hosts_full_of_what_waits_for_the_other_get_on() -> None:
    """Each host holds what is to land on the other. The younger request gives way and is computed again."""
    made = two_hosts(*(request(name, tokens=20, output=30) for name in "qrstuv"), policy=RESTLESS)
    small = replace(made.cluster, kv=replace(made.cluster.kv, blocks=14), tick_s=0.02)
    cluster = play(replace(made, cluster=small))
    assert {outcome(life) for life in cluster.server.journal.lives.values()} == {"finished"}


def test_nothing_waits_to_land_on_a_host_that_is_gone() -> None:
    """r waits for room on host b when b goes down and comes back empty, while nobody else could take r."""
    kill = Kill(worker=WorkerId("prefill-0"), at_s=0.15, death=Death(restart_s=2.0))
    down = HostKill(host=B, at_s=0.16, notice_s=0.0, restart_s=0.1)
    made = two_hosts(request("q", tokens=30, output=30), request("r", tokens=30, at_s=0.05), faults=(kill, down))
    cluster = play(replace(made, cluster=replace(made.cluster, kv=replace(made.cluster.kv, blocks=15))))
    assert {outcome(life) for life in cluster.server.journal.lives.values()} == {"finished"}


def test_a_worker_that_scaling_adds_is_like_the_others_of_its_role_arena_and_host() -> None:
    """One role's workers have a host each, of a kind with its own arena; the other's share one that has a name."""
    spec = load_spec(
        "workers = [{role = 'prefill', host = 'a'}, {role = 'decode', host = 'each', kind = 'small'}]\n"
        "[kv]\nblocks = 40\n[kinds.small]\ncost = {model = 'linear'}\nkv = {blocks = 7}"
    )
    cluster = build_cluster(
        spec,
        configured_policies(policy_set("baton"), spec),
        lambda host: LengthEngine({}),
        seed=0,
        journal=Journal(keep_log=False),
        closed=lambda life: None,
    )
    for role in ("decode", "prefill"):
        cluster.reshape(StartWorker(WorkerId(f"{role}-added"), role))
    cluster.loop.run(until_s=math.inf, events_max=1000, after_each=lambda: None)
    pools = cluster.server.pools
    assert {host: pool.view().blocks_total for host, pool in pools.items()} == {
        "a": 40,
        "host-of-decode-0": 7,
        "host-of-decode-added": 7,
    }
    homes = {worker.id: worker.batcher.view(0.0).host for worker in cluster.workers}
    assert homes[WorkerId("prefill-added")] == "a"
    assert homes[WorkerId("decode-added")] == "host-of-decode-added"


def test_workers_that_share_a_host_share_the_room_of_all_of_them() -> None:
    """What fits beside the weights of each is added up, whatever its kind; an arena that is told is what was told."""
    spec = load_spec(
        "workers = [{role = 'prefill', count = 2, kind = 'large', host = 'a'},"
        " {role = 'decode', kind = 'small', host = 'a'},"
        " {role = 'decode', kind = 'large', host = 'b'}, {role = 'decode', kind = 'small', host = 'c'},"
        " {role = 'mixed', count = 3, kind = 'told', host = 'd'}, {role = 'mixed', count = 2, host = 'e'}]\n"
        "[kinds]\nlarge.cost = {model = 'roofline', llm = 'llama3.1-8b', hardware = 'A100'}\n"
        "small.cost = {model = 'roofline', llm = 'llama3.1-8b', hardware = 'L4'}\n"
        "told = {cost = {model = 'roofline', llm = 'llama3.1-8b', hardware = 'L4'}, kv = {blocks = 7}}"
    )
    blocks = {host: spec.kv_of(host).blocks for host in spec.hosts()}
    assert blocks[B] > blocks[HostId("c")] > 0
    assert blocks[A] == pytest.approx(2 * blocks[B] + blocks[HostId("c")], abs=3)
    assert (blocks[HostId("d")], blocks[HostId("e")]) == (7, spec.kv.blocks)


def test_two_workers_on_one_host_serve_as_many_as_on_two() -> None:
    """64 answers at once to prompts of 1,500 tokens: half of them fit one L4. Nobody waits for the other's room."""

    def duration_s(host: str) -> float:
        spec = load_spec(
            f"workers = [{{role = 'mixed', count = 2, kind = 'l4', host = '{host}'}}]\n"
            "kinds.l4.cost = {model = 'roofline', llm = 'llama3.1-8b', hardware = 'L4'}"
        )
        asked = tuple(TraceRequest(at_s=0.0, input_tokens=1500, output_tokens=100) for _ in range(64))
        trace = Trace(format="test", timing="absolute", requests=asked)
        return max(record.end_s for record in replay_trace(spec, trace, policy="least-load", seed=0))

    assert duration_s("host-0") == pytest.approx(duration_s("each"), rel=0.05)


@pytest.mark.parametrize("policy", ["baton", "distserve", "splitwise"])
def test_a_copy_goes_at_the_slower_wire_whatever_the_order_of_the_kinds(policy: str) -> None:
    """50 prompts of 500 tokens: with a fast wire at one end all of them end as with two slow ones."""

    def ends_s(kinds: dict[str, float]) -> list[float]:
        made = {
            name: SimKind(cost={"model": "linear", "handoff_token_s": token_s}, kv=SimKV(blocks=4096))
            for name, token_s in kinds.items()
        }
        workers = (SimWorkers(role="prefill", kind="p", host="each"), SimWorkers(role="decode", kind="d", host="each"))
        asked = tuple(TraceRequest(at_s=0.5 * place, input_tokens=500, output_tokens=10) for place in range(50))
        trace = Trace(format="test", timing="absolute", requests=asked)
        records = replay_trace(ClusterSpec(kinds=made, workers=workers), trace, policy=policy, seed=0)
        return [record.end_s for record in records]

    slow, fast = 1e-3, 1e-6
    both_slow = ends_s({"p": slow, "d": slow})
    assert ends_s({"p": fast, "d": slow}) == ends_s({"d": slow, "p": fast}) == both_slow
    assert ends_s({"p": slow, "d": fast}) == ends_s({"d": fast, "p": slow}) == both_slow
    assert ends_s({"p": fast, "d": fast})[0] < both_slow[0] - 0.4


def test_a_host_takes_along_what_scaling_has_added_there() -> None:
    """One that had joined is lost with it, and one that was on its way will not come. It comes back as it was."""
    made = two_hosts(request("r", output=200))
    playing = prepare_play(replace(made, cluster=replace(made.cluster, worker_start_s=0.1)))
    cluster, loop = playing.cluster, playing.cluster.loop
    there, late, other = (WorkerId(name) for name in ("there", "late", "other"))
    cluster.reshape(StartWorker(there, "decode"))
    loop.at(0.15, lambda: cluster.reshape(StartWorker(late, "decode")))
    loop.at(0.15, lambda: cluster.reshape(StartWorker(other, "prefill")))
    loop.at(0.2, lambda: cluster.kill_host(B, notice_s=0.02, restart_s=0.3))
    loop.at(0.21, lambda: cluster.reshape(StartWorker(WorkerId("unnoticed"), "decode")))
    seen: list[set[WorkerId]] = []
    for moment_s in (0.19, 0.3, 0.6):
        loop.at(moment_s, lambda: seen.append(set(cluster.server.cluster.workers)))
    loop.run(until_s=math.inf, events_max=10_000)
    started = {WorkerId("prefill-0"), WorkerId("decode-0")}
    assert seen == [{*started, there}, {WorkerId("prefill-0"), other}, {*started, other}]
    lost = [entry.event for entry in cluster.server.journal.turns]
    assert [event.worker for event in lost if isinstance(event, WorkerLost)] == [late, WorkerId("unnoticed")]
    assert cluster.server.routes.keys() == cluster.server.cluster.workers.keys()
    assert {worker.id for worker in cluster.workers} == {*started, other}


def test_a_retired_worker_whose_host_comes_back_is_not_taken_for_its_successor() -> None:
    """Its last words take half a second. By then its host has been down, and has brought up another of its name."""
    playing = prepare_play(two_hosts(request("r", output=200)))
    cluster, loop, retired = playing.cluster, playing.cluster.loop, WorkerId("decode-0")
    loop.at(0.1, lambda: delay_messages(cluster, 0.5))
    loop.at(0.15, lambda: cluster.reshape(RetireWorker(retired)))
    loop.at(0.16, lambda: cluster.kill_host(B, notice_s=0.0, restart_s=0.01))
    loop.at(0.17, lambda: delay_messages(cluster, 0.0))
    seen: list[bool] = []
    loop.at(0.9, lambda: seen.append(retired in cluster.server.cluster.workers))
    playing.run()
    assert seen == [True]
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_a_worker_that_dies_before_it_can_be_retired_does_not_come_back() -> None:
    made = two_hosts(request("r", output=40))
    playing = prepare_play(made)
    cluster, loop = playing.cluster, playing.cluster.loop
    spare = WorkerId("spare")
    cluster.boot(WorkerView(id=spare, host=B, role="decode"))
    loop.at(0.1, lambda: cluster.kill(spare, Death(notice_s=0.05, restart_s=0.01), "killed"))
    loop.at(0.12, lambda: cluster.reshape(RetireWorker(spare)))
    playing.run()
    assert {worker.id for worker in cluster.workers} == {"prefill-0", "decode-0"}


def test_a_stale_entry_of_the_prefix_index_costs_a_recompute_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index says that both hosts hold the prompt, and neither does: routing and fetching by it find nothing."""
    made = two_hosts(*(request(name, tokens=14) for name in "pqrs"), policy=RESTLESS)
    hashes = [name for planned in made.requests for name in block_hashes(planned.prompt, block_tokens=4)]
    handle = Cluster.handle

    def handle_and_make_stale(self: Cluster, event: ClusterEvent, now_s: float) -> list[ClusterCommand]:
        commands = handle(self, event, now_s)
        if isinstance(event, HostAdded):
            self.coordinator.handle(BlocksStored(event.host, tuple(hashes)), 0.0)
        return commands

    monkeypatch.setattr(Cluster, "handle", handle_and_make_stale)
    playing = prepare_play(made)
    playing.run()
    starts = [command for entry in playing.cluster.server.journal.decisions() for command in entry.commands]
    assert any(isinstance(command, StartPrefill) for command in starts)
    lives = playing.cluster.server.journal.lives.values()
    assert {(outcome(life), life.cached_tokens) for life in lives} == {("finished", 0)}


def test_a_host_that_leaves_hands_its_decode_over_first() -> None:
    """No token is computed again: its KV is copied while it decodes, and the host goes when nothing needs it."""
    leave = HostLeave(host=B, at_s=0.1)
    made = two_hosts(request("r", output=60), faults=(leave,))
    cluster = play(replace(made, cluster=replace(made.cluster, worker_start_s=5.0)))
    life = cluster.server.journal.lives[RequestId("r")]
    assert (outcome(life), life.attempt, len(life.output)) == ("finished", 2, 60)
    assert life.token_times_s[-1] < 5.0, "it did not wait for the host to come back"
    lost_s = [entry.now_s for entry in cluster.server.journal.log if isinstance(entry.event, HostLost)]
    assert len(lost_s) == 1
    assert leave.at_s < lost_s[0] < life.token_times_s[-1]
    moved_tokens = sum(time_s <= lost_s[0] for time_s in life.token_times_s) + 12
    landed = [each for each in landings(cluster) if each.request_id == "r"][-1]
    assert landed.computed_tokens >= moved_tokens - 2, "only the last token was not computed"


@pytest.mark.parametrize("is_leaving", [True, False], ids=["leaves", "dies"])
def test_a_host_that_leaves_hands_its_prefixes_over(is_leaving: bool) -> None:
    """The conversation of the second request was on that host. A host that dies takes it along."""
    leave: Fault = HostLeave(host=A, at_s=0.5)
    made = two_hosts(
        request("first", tokens=14, output=11),
        request("other", tokens=14, output=11),
        request("second", tokens=3, at_s=1.0, follows="first"),
        faults=(leave if is_leaving else HostKill(host=A, at_s=0.5, notice_s=0.0, restart_s=9.0),),
    )
    workers = (SimWorkers(role="mixed", host=A), SimWorkers(role="mixed", host=B))
    cluster = play(replace(made, cluster=replace(made.cluster, workers=workers, worker_start_s=9.0)))
    lives = cluster.server.journal.lives
    workers_after = [lives[RequestId(name)].worker for name in ("first", "other", "second")]
    assert workers_after == [None, "mixed-1", "mixed-1"], "the first one was on the host that is gone"
    assert lives[RequestId("second")].cached_tokens == (24 if is_leaving else 0)
    assert cluster.wires.tokens == (48 if is_leaving else 0), "and back, when the host joins again"


def test_a_host_that_leaves_without_a_request_goes_at_once() -> None:
    cluster = play(two_hosts(request("r", at_s=1.0), faults=(HostLeave(host=B, at_s=0.1),)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_the_last_host_that_leaves_goes_after_its_time_and_its_request_waits() -> None:
    made = two_hosts(
        request("r", output=60),
        faults=(HostLeave(host=A, at_s=0.1, drain_s=0.2), HostLeave(host=B, at_s=0.1, drain_s=0.2)),
    )
    cluster = play(replace(made, cluster=replace(made.cluster, worker_start_s=0.5)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"
