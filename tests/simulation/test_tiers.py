"""Tiers below an arena, one situation a test: what is read again, what is not, and what damage costs."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.tier_messages import TierView
from baton.core.types import HostId, RequestId
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import HostKill, StoreFault
from baton.lab.sim.spec import HOST, SimTier, SimWorkers
from tests.campaign.play import play
from tests.campaign.scenario import RESTLESS, PlannedRequest, Scenario
from tests.campaign.triggers import Fault
from tests.simulation.test_behaviour import outcome, request, scenario

FAST = SimTier(blocks=100, latency_s=0.0001, bytes_per_s=1e6, token_bytes=1)
DOWN = HostKill(host=HOST, at_s=1.0, notice_s=0.0, restart_s=0.1)
"""The host comes back with an empty arena; its store still has what it had."""
LATER = 2.0


def with_tier(*requests: PlannedRequest, tier: SimTier = FAST, faults: tuple[Fault, ...] = (DOWN,)) -> Scenario:
    made = scenario(*requests, faults=faults)
    workers = (SimWorkers(role="mixed", host=HOST),)
    return replace(made, cluster=replace(made.cluster, workers=workers, tiers=(tier,)))


def twice(salt: str = "") -> tuple[PlannedRequest, PlannedRequest]:
    """One prompt of 22 tokens, five whole blocks of four, before and after the host was down."""
    first = request("a", tokens=22)
    return first, replace(first, id=RequestId("b"), at_s=LATER, cache_salt=salt)


def cached(cluster: SimCluster, name: str) -> int | None:
    life = cluster.server.journal.lives[RequestId(name)]
    assert outcome(life) == "finished"
    return life.cached_tokens


def view(cluster: SimCluster, host: HostId = HOST) -> TierView:
    tiers = cluster.server.pools[host].tiers
    assert tiers is not None
    return tiers.tiers[0].view()


def test_what_a_host_kept_is_read_after_it_was_down() -> None:
    cluster = play(with_tier(*twice()))
    assert cached(cluster, "b") == 20
    assert view(cluster).loaded_blocks == 5


def test_another_salt_never_hits_what_a_tier_has() -> None:
    cluster = play(with_tier(*twice(salt="another")))
    assert cached(cluster, "b") == 0
    assert view(cluster).loaded_blocks == 0


def test_another_salt_never_hits_in_the_arena_either() -> None:
    first, second = twice(salt="another")
    cluster = play(with_tier(first, second, faults=()))
    assert cached(cluster, "b") == 0
    assert cached(play(with_tier(*twice(), faults=())), "b") == 20, "under one salt it does"


def test_a_tier_that_is_slower_than_computing_is_not_read() -> None:
    cluster = play(with_tier(*twice(), tier=replace(FAST, latency_s=0.4)))
    assert view(cluster).blocks_cached >= 5
    assert (cached(cluster, "b"), view(cluster).loaded_blocks) == (0, 0)


def test_a_damaged_block_ends_what_is_read_and_costs_a_recompute() -> None:
    """INV-8 is checked at the end: what lies where the block could not be read becomes nobody's text."""
    damaged = StoreFault(host=HOST, tier="file", what="damaged", at_s=1.5, for_s=0.0)
    cluster = play(with_tier(*twice(), faults=(DOWN, damaged)))
    found = cached(cluster, "b")
    assert found is not None
    assert found < 20
    assert view(cluster).missed_blocks > 0


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    """It is answered for: nothing was read, and the prompt is computed."""
    hung = StoreFault(host=HOST, tier="file", what="down", at_s=1.5, for_s=9.0)
    cluster = play(with_tier(*twice(), faults=(DOWN, hung)))
    assert cached(cluster, "b") == 0
    assert view(cluster).missed_blocks == 5


def test_a_store_that_is_full_keeps_nothing_and_holds_up_nobody() -> None:
    full = StoreFault(host=HOST, tier="file", what="full", at_s=0.0, for_s=9.0)
    cluster = play(with_tier(*twice(), faults=(full, DOWN)))
    assert cached(cluster, "b") == 0
    assert view(cluster).stored_blocks == 0


def test_another_salt_never_hits_on_another_host_or_in_a_tier_of_all_hosts() -> None:
    """Restless policies route anywhere and fetch from anywhere; a tier is shared. Only the salts keep them apart."""
    prompts = [replace(request(f"r{place}", tokens=22, at_s=place * 0.5), cache_salt=f"{place}") for place in range(6)]
    alike = [replace(planned, prompt=prompts[0].prompt) for planned in prompts]
    made = with_tier(*alike, tier=replace(FAST, shared=True), faults=())
    workers = tuple(SimWorkers(role="mixed", host=host) for host in ("a", "b"))
    cluster = play(replace(made, cluster=replace(made.cluster, workers=workers), policy=RESTLESS))
    assert {cached(cluster, planned.id) for planned in alike} == {0}


def test_a_decode_reads_the_blocks_of_its_answer_after_its_host_was_down() -> None:
    """It had computed about 110 tokens, 27 blocks. Before, the five blocks of the prompt were read."""
    cluster = play(with_tier(request("a", tokens=22, output=100), tier=replace(FAST, when="sealed")))
    assert outcome(cluster.server.journal.lives[RequestId("a")]) == "finished"
    assert view(cluster).loaded_blocks >= 25


def test_a_decode_continues_on_another_host_from_the_tier_that_both_share() -> None:
    made = with_tier(request("a", tokens=22, output=100), tier=replace(FAST, when="sealed", shared=True), faults=())
    workers = tuple(SimWorkers(role="mixed", host=host) for host in ("a", "b"))
    kills = tuple(HostKill(host=HostId(host), at_s=1.0, notice_s=0.0, restart_s=9.0) for host in ("a", "b"))
    read = [
        view(play(replace(made, cluster=replace(made.cluster, workers=workers), faults=(kill,))), other).loaded_blocks
        for kill, other in zip(kills, (HostId("b"), HostId("a")), strict=True)
    ]
    assert max(read) >= 25, read
    assert min(read) == 0, "the loss of the host that is idle reads nothing"
