"""The end of a prompt goes over layer by layer while it is computed. One situation a test; every byte is checked."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.copies import CopyBlocks, LandingEnded
from baton.core.types import HostId, RequestId, Role, WorkerId
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death, HostKill, Kill, WireCut
from baton.lab.sim.spec import SimWire, SimWorkers
from tests.campaign.play import play, prepare_play
from tests.campaign.scenario import FREQUENT_TICKS_WAIT_S, RESTLESS, Scenario, draw_scenario, with_faults
from tests.campaign.triggers import Cancel
from tests.seeds import Seeds
from tests.simulation.test_ahead import landed_tokens, pool_decisions
from tests.simulation.test_behaviour import outcome, request
from tests.simulation.test_hosts import A, B, two_hosts

LAYERS = 8


def layered(*, tokens: int = 300, step_tokens: int = 512, policy: str = "baton", **changes: object) -> Scenario:
    """A prompt that is computed in one step, on a model of eight layers, and decoded on another host."""
    made = two_hosts(request("r", tokens=tokens), policy=policy)
    batch = replace(made.cluster.batch, step_tokens_max=step_tokens)
    cluster = replace(made.cluster, layers=LAYERS, kv=replace(made.cluster.kv, blocks=400), batch=batch)
    return replace(made, cluster=cluster, **changes)


def copies_of(scenario: Scenario) -> tuple[SimCluster, list[CopyBlocks]]:
    """Play it, and list the copies that its wire was given."""
    playing = prepare_play(scenario)
    cluster, begun = playing.cluster, list[CopyBlocks]()
    seconds = cluster.wires.seconds

    def note(copy: CopyBlocks) -> float:
        begun.append(copy)
        return seconds(copy)

    cluster.wires.seconds = note
    playing.run()
    return cluster, begun


def exposed_s(scenario: Scenario) -> float:
    """From the first token, at the end of the prompt, to the second, less what a step takes that decodes it."""
    times_s = play(scenario).server.journal.lives[RequestId("r")].token_times_s
    return times_s[1] - times_s[0]


def test_layers_go_over_while_later_ones_are_computed() -> None:
    """Each copy brings the layers behind those of the one before, and the last one is the smallest."""
    cluster, begun = copies_of(layered())
    spans = [copy.layers for copy in begun]
    assert len(spans) > 2
    assert all(span is not None for span in spans)
    ends = [span.end for span in spans if span is not None]
    assert [span.first for span in spans if span is not None] == [0, *ends[:-1]]
    assert ends[-1] == LAYERS
    sizes = [span.end - span.first for span in spans if span is not None]
    assert sizes[-1] == min(sizes)
    assert {copy.tokens for copy in begun} == {300}
    assert cluster.wires.tokens == 300, "the unsealed tail has come over too: nothing is left for a copy after it"
    assert landed_tokens(cluster, B) == [300]


def test_what_is_exposed_is_the_last_layers() -> None:
    """One step computes the prompt, so by chunk nothing of it is hidden."""
    by_chunk = exposed_s(replace(layered(), cluster=replace(layered().cluster, layers=1)))
    assert exposed_s(layered()) < by_chunk / 2


def test_only_the_last_chunk_is_cut_into_layers() -> None:
    """What is sealed before it goes over whole, as it did."""
    made = layered(tokens=400, step_tokens=160)
    quick = replace(made.cluster.cost, handoff_token_s=0.0002)  # or the wire is still busy with what is sealed
    cluster, begun = copies_of(replace(made, cluster=replace(made.cluster, cost=quick)))
    assert begun[0].layers is None
    assert begun[0].first_token == 0
    last = [copy for copy in begun if copy.layers is not None]
    assert last
    assert {copy.first_token for copy in last} == {320}
    assert cluster.wires.tokens == 400


def test_a_worker_that_dies_in_the_step_leaves_nothing_that_counts() -> None:
    """Layers of its chunk are at the target already: they are given back, and the prompt is computed again."""
    made = layered(faults=(Kill(worker=WorkerId("prefill-0"), at_s=0.2, death=Death(restart_s=9.0)),))
    workers = (SimWorkers(role="prefill", host=A, count=2), SimWorkers(role="decode", host=B))
    cluster = play(replace(made, cluster=replace(made.cluster, workers=workers)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"
    landed = [entry.event for entry in pool_decisions(cluster, B) if isinstance(entry.event, LandingEnded)]
    assert (landed[0].computed_tokens, landed[0].hashes) == (0, ())
    assert landed[-1].computed_tokens == 300


def test_a_wire_that_breaks_under_a_layer_costs_no_token() -> None:
    cluster = play(layered(faults=(WireCut(one=A, other=B, at_s=0.2, for_s=0.05),)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"
    assert landed_tokens(cluster, B)[0] == 0, "the layers that had landed before count for nothing"
    assert landed_tokens(cluster, B)[-1] == 300


@pytest.mark.parametrize("host", [A, B])
def test_a_host_that_dies_under_it_costs_no_token(host: HostId) -> None:
    cluster = play(layered(faults=(HostKill(host=host, at_s=0.2, notice_s=0.01, restart_s=0.1),)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_a_client_that_leaves_in_the_step_frees_the_blocks_of_both_hosts() -> None:
    cluster = play(layered(faults=(Cancel(request_id=RequestId("r"), stage="prefilling", delay_s=0.15),)))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "cancelled"


def test_a_prompt_that_is_there_already_needs_no_copy() -> None:
    """A second prompt like the first: the target finds its blocks in its cache, but for the unsealed tail."""
    again = replace(request("r"), id=RequestId("again"), prompt=request("r", tokens=301).prompt, at_s=3.0)
    made = layered()
    cluster, begun = copies_of(replace(made, requests=(*made.requests, again)))
    assert {copy.tokens for copy in begun if copy.request_id == "again"} == {1}
    assert landed_tokens(cluster, B)[-1] == 301


@pytest.mark.parametrize("chunk", range(4))
def test_layers_through_every_fault(chunk: int, seeds: Seeds) -> None:
    """Four workers on three hosts under policies that send everything ahead, with the faults of the campaign."""
    workers = (
        SimWorkers(role="prefill", host="a", count=2),
        SimWorkers(role="decode", host="b"),
        SimWorkers(role="decode", host="c"),
    )
    for seed in seeds.draw(32, deep=240)[chunk::4]:
        drawn = draw_scenario(seed)
        wait_s = min(drawn.cluster.wait_s, FREQUENT_TICKS_WAIT_S)
        cluster = replace(drawn.cluster, workers=workers, kinds={}, layers=4, tick_s=0.05, wait_s=wait_s)
        play(with_faults(replace(drawn, cluster=cluster, policy=RESTLESS)))


def test_what_some_layers_take_is_predicted_for_some_layers() -> None:
    """Measured as a copy of all layers each would be, the way would look several times as fast as it is."""
    cluster, begun = copies_of(layered())
    assert sum(copy.whole_tokens for copy in begun) == pytest.approx(300, abs=len(begun))
    links, now_s = cluster.server.cluster.transfers.links, cluster.loop.now_s
    assert links.view((A, B), 300, lambda tokens: 0.001 * tokens, now_s).expected_s > 0.3 / 2 > 0.3 / len(begun)


@pytest.mark.parametrize("role", ["prefill", "mixed"])
def test_the_prompt_hides_the_first_handoff_and_no_later_move(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_s, moved = SimCluster.copy_s, list[tuple[bool, bool]]()

    def watched(self: SimCluster, copy: CopyBlocks) -> float:
        seconds, tokens = copy_s(self, copy), len(self.server.journal.lives[copy.request_id].token_times_s)
        moved.append((tokens <= 1, seconds < 0.001 * copy.tokens))
        return seconds

    monkeypatch.setattr(SimCluster, "copy_s", watched)
    made = two_hosts(request("q", output=60), request("r", output=60), policy=RESTLESS)
    workers = (SimWorkers(role=role, host=A), SimWorkers(role="mixed" if role == "mixed" else "decode", host=B))
    wire = SimWire(overlap_ratio=1.0, residue_s=0.0)
    play(replace(made, cluster=replace(made.cluster, workers=workers, wire=wire, tick_s=0.05)))
    assert (False, False) in moved
    assert (False, True) not in moved
    assert ((True, True) in moved) is (role == "prefill")
