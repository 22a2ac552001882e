"""How long reading from a tier takes is learned, and counts in predictions: one situation a test."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.messages import RequestArrived
from baton.core.types import RequestId
from baton.lab.sim.faults import StoreFault
from baton.lab.sim.spec import HOST
from tests.campaign.play import play, prepare_play
from tests.simulation.test_tiers import DOWN, FAST, LATER, cached, twice, view, with_tier


def test_a_tier_that_turns_out_slow_is_not_read_again() -> None:
    """20 tokens take 20 ms to compute, and are promised in 4 ms; reading them takes 40. Once is enough to know."""
    slow = StoreFault(host=HOST, tier="file", what="slow", at_s=0.9, for_s=99.0)
    downs = [replace(DOWN, at_s=float(second)) for second in (1, 3)]
    first, second = twice()
    third = replace(second, id=RequestId("c"), at_s=4.0)
    tier = replace(FAST, latency_s=0.004, shared=True)
    cluster = play(with_tier(first, second, third, tier=tier, faults=(slow, *downs)))
    assert (cached(cluster, "b"), cached(cluster, "c")) == (20, 0)
    assert view(cluster).loaded_blocks == 5


def test_the_first_token_is_predicted_with_the_time_of_reading() -> None:
    """Read in 15 ms, then 2 of 22 tokens computed in 12 ms, where all 22 take 32 ms: the log of decisions says so."""
    played = with_tier(*twice(), tier=replace(FAST, latency_s=0.015))
    cluster = prepare_play(played)
    cluster.run()
    lines = cluster.cluster.server.journal.log
    (arrival,) = [
        line.event for line in lines if isinstance(line.event, RequestArrived) and line.event.request.id == "b"
    ]
    (hit,) = arrival.tier_hits[HOST]
    assert (hit.tokens, round(hit.load_s, 3)) == (20, 0.015)
    life = cluster.cluster.server.journal.lives[RequestId("b")]
    assert life.token_times_s[0] - LATER > 0.015 + 0.012
