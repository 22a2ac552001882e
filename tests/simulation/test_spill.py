"""Requests that are larger than the arena, with a spill space. INV-8 is checked of every text."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.errors import ConfigError
from baton.core.messages import ToWorker
from baton.core.spill import BlocksSpilled, SpillBlocks
from baton.core.types import WorkerId
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death, Kill
from baton.lab.sim.spec import load_spec
from baton.lab.sim.spill import SimSpill
from tests.campaign.play import play
from tests.campaign.scenario import Scenario
from tests.campaign.triggers import Fault
from tests.simulation.test_behaviour import outcome, request, scenario
from tests.simulation.test_swap import end_s, pool_log

ARENA_BLOCKS, BLOCK_TOKENS = 16, 4
SPILL = SimSpill(blocks=80, bytes_per_s=1e9, token_bytes=1000)


def large(
    *, spill: SimSpill = SPILL, topology: tuple[int, int, int] = (1, 1, 0), faults: tuple[Fault, ...] = ()
) -> Scenario:
    """A prompt of 4 arenas beside small ones."""
    long = request("a", tokens=4 * ARENA_BLOCKS * BLOCK_TOKENS, output=60)
    small = [request(name, tokens=8, output=12, at_s=0.2 * index) for index, name in enumerate("bcde")]
    made = scenario(long, *small, topology=topology, blocks=ARENA_BLOCKS, faults=faults)
    return replace(made, cluster=replace(made.cluster, spill=spill))


def finished(made: Scenario) -> SimCluster:
    cluster = play(made)
    assert {outcome(life) for life in cluster.server.journal.lives.values()} == {"finished"}
    return cluster


def spilled_blocks(cluster: SimCluster) -> int:
    """Return the number of blocks that workers have copied to the spill space."""
    orders = [each.command for entry in pool_log(cluster) for each in entry.commands if isinstance(each, ToWorker)]
    assert any(isinstance(entry.event, BlocksSpilled) for entry in pool_log(cluster))
    return sum(len(order.blocks) for order in orders if isinstance(order, SpillBlocks))


@pytest.mark.parametrize("topology", [(1, 1, 0), (0, 0, 1), (0, 0, 2)])
def test_a_prompt_of_four_arenas_gives_the_text_of_a_large_arena(topology: tuple[int, int, int]) -> None:
    """`play` compares every text with that of the request alone in an arena of its size."""
    assert spilled_blocks(finished(large(topology=topology))) >= 3 * ARENA_BLOCKS


@pytest.mark.parametrize("at_s", [0.5, 2.0, 6.0])
def test_a_killed_worker_changes_no_text(at_s: float) -> None:
    """Copies that it has not confirmed are undone; another worker of the host reads the confirmed ones."""
    kill = Kill(worker=WorkerId("mixed-0"), at_s=at_s, death=Death(notice_s=0.1, restart_s=1.0))
    finished(large(topology=(0, 0, 2), faults=(kill,)))


def test_a_slow_spill_space_slows_the_steps() -> None:
    """The slower of the computation and the reads determines a step."""
    fast, slow = finished(large()), finished(large(spill=replace(SPILL, bytes_per_s=1e6)))
    assert end_s(slow) > 2 * end_s(fast)


def test_the_rate_limits_the_length_of_requests() -> None:
    """At one token per second, 200,000 bytes/s read at most 200 tokens of 1,000 bytes a step."""
    spec = large(spill=replace(SPILL, bytes_per_s=2e5)).cluster
    assert spec.request_tokens_max == 200
    assert large().cluster.request_tokens_max == (ARENA_BLOCKS * 3 // 4 + 80) * BLOCK_TOKENS


def test_several_hosts_with_a_spill_space_are_refused() -> None:
    with pytest.raises(ConfigError, match="spill is for one host"):
        load_spec('spill = { blocks = 8 }\nworkers = [{ role = "mixed", count = 2, host = "each" }]')
