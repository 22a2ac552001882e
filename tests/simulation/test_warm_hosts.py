"""A host that joins gets the hot prefixes of another one ahead of demand, up to a bound."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import asdict, replace

from baton.core.types import RequestId
from baton.decide.control.host_pools import PoolRules
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.engines import content_layout
from baton.lab.sim.faults import HostKill
from baton.lab.sim.spec import SimKind, SimKV, SimWorkers
from tests.campaign.play import play
from tests.simulation.test_behaviour import request
from tests.simulation.test_hosts import A, B, two_hosts

BLOCK_TOKENS = 4


def played(*, is_shared: bool, blocks_max: int, block_runs: int = 1) -> SimCluster:
    """Restart host B, then kill host A, where a conversation has 24 cached tokens. It goes on at host B.

    `is_shared`: two requests have used these tokens before. `blocks_max`: the bound on the copied blocks.
    `block_runs`: number of hashes per block of both hosts.
    """
    turns = [request("first", tokens=14, output=11)]
    turns += [request("second", tokens=3, at_s=1.0, follows="first")] if is_shared else []
    made = two_hosts(
        *turns,
        request("last", tokens=3, at_s=6.0, follows="first"),
        faults=(
            HostKill(host=B, at_s=2.0, notice_s=0.0, restart_s=1.0),
            HostKill(host=A, at_s=5.0, notice_s=0.0, restart_s=99.0),
        ),
    )
    kv = SimKV(blocks=32, block_tokens=block_runs * BLOCK_TOKENS)
    kinds = {"any": SimKind(cost={"model": "linear", **asdict(made.cluster.cost)}, kv=kv)}
    workers = tuple(SimWorkers(role="mixed", host=host, kind="any") for host in (A, B))
    bound_bytes = blocks_max * content_layout(kv.block_tokens, made.cluster.layers).block_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.lab.sim.cluster.PoolRules", partial(PoolRules, handover_bytes=bound_bytes))
        return play(replace(made, cluster=replace(made.cluster, workers=workers, kinds=kinds)))


@pytest.mark.parametrize(
    ("is_shared", "blocks_max", "cached_tokens"),
    [(True, 100, 24), (True, 2, 2 * BLOCK_TOKENS), (True, 0, 0), (False, 100, 0)],
    ids=["shared", "bounded", "off", "used-once"],
)
def test_a_host_that_joins_gets_the_hot_prefixes_of_another(
    is_shared: bool, blocks_max: int, cached_tokens: int
) -> None:
    """Before, the host had none of them, and their KV was lost with the other host."""
    cluster = played(is_shared=is_shared, blocks_max=blocks_max)
    last = cluster.server.journal.lives[RequestId("last")]
    assert (last.worker, last.cached_tokens) == ("mixed-1", cached_tokens)
    assert cluster.wires.tokens == 2 * cached_tokens, "to B, and back to A when it joins again"


@pytest.mark.parametrize(("block_runs", "cached_tokens"), [(2, 24), (4, 16)])
def test_hosts_with_larger_blocks_than_the_server_copy_the_blocks_of_the_hashes(
    block_runs: int, cached_tokens: int
) -> None:
    """The text would change if the KV of other tokens were cached under a block's hash."""
    cluster = played(is_shared=True, blocks_max=100, block_runs=block_runs)
    assert cluster.server.journal.lives[RequestId("last")].cached_tokens == cached_tokens


@pytest.mark.parametrize(("users", "cached_tokens"), [(4, 24), (2, 0)], ids=["hot", "used-twice"])
def test_hot_prefixes_are_copied_to_the_other_host_ahead_of_demand(users: int, cached_tokens: int) -> None:
    """Their host is lost, and a request with the prefix finds it on the other one, which has never computed it."""
    turns = [request("first", tokens=14, output=11)]
    turns += [request(f"again-{n}", tokens=3, at_s=float(n), follows="first") for n in range(1, users)]
    made = two_hosts(
        *turns,
        request("last", tokens=3, at_s=45.0, follows="first"),
        faults=(HostKill(host=A, at_s=40.0, notice_s=0.0, restart_s=99.0),),
        policy="baton",
    )
    workers = (SimWorkers(role="mixed", host=A), SimWorkers(role="mixed", host=B))
    cluster = play(replace(made, cluster=replace(made.cluster, workers=workers)))
    last = cluster.server.journal.lives[RequestId("last")]
    assert (last.worker, last.cached_tokens) == ("mixed-1", cached_tokens)
