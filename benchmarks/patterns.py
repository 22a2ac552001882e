"""Two ways of a request's KV from prefill to decode: directly, by a pool that both use, and as the policy chooses.

    python benchmarks/patterns.py [--requests 60] [--prompts 512 7500 32000]    # simulated, two minutes
    python benchmarks/patterns.py --live [--rounds 5]    # real hosts, some four minutes; another result file

Simulated: Llama-3.1-8B's KV (131,072 bytes a token), two hosts that prefill and two that decode, 25 Gb/s between any
two; the pool has 25 or 100 Gb/s in all, and every host 25 to it. Each client asks again when it has its answer; prompts
share nothing. Then the same with hosts that die while they prefill, and with wires that break.

Live: SmolLM2-135M on two hosts of one thread each and a `baton pool`, all on this machine; one request at a time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import record
from msgspec.structs import replace

from baton.core.config import BatchLimits, Plugin, PolicyConfig
from baton.core.copies import LayerSpan
from baton.core.step import Step, StepResult
from baton.core.types import BlockId, HostId, Request, RequestId, Sampling
from baton.decide.kv.hashing import block_hashes
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.build import build_cluster
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.engines import LengthEngine
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.replay_trace import check_nothing_left
from baton.lab.sim.spec import ClusterSpec, SimCost, SimKV, SimTier, SimWorkers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.hosting import cluster as real_hosts

TOKEN_BYTES = 131_072
WIRE_BYTES_PER_S = 25e9 / 8
BLOCK_TOKENS = 64
OUTPUT_TOKENS = 64
PREFILL_HOSTS = (HostId("p0"), HostId("p1"))
DECODE_HOSTS = (HostId("d0"), HostId("d1"))
WAYS = ("direct", "central", "baton")
"""Sets of policies by name; `baton` chooses."""
POOLS = {"25 Gb/s": WIRE_BYTES_PER_S, "100 Gb/s": 4 * WIRE_BYTES_PER_S}
PROMPTS = (512, 7500, 32000)
CLIENTS = (1, 8)


def cluster_spec(pool_bytes_per_s: float) -> ClusterSpec:
    """Accelerators that compute 15,000 prompt tokens a second."""
    prefill = tuple(SimWorkers(role="prefill", host=host) for host in PREFILL_HOSTS)
    decode = tuple(SimWorkers(role="decode", host=host) for host in DECODE_HOSTS)
    pool = SimTier(
        name="pool",
        blocks=200_000,
        latency_s=0.0005,
        bytes_per_s=pool_bytes_per_s,
        host_bytes_per_s=WIRE_BYTES_PER_S,
        token_bytes=TOKEN_BYTES,
        shared=True,
    )
    return ClusterSpec(
        workers=(*prefill, *decode),
        kv=SimKV(blocks=6000, block_tokens=BLOCK_TOKENS),
        batch=BatchLimits(step_tokens_max=2048, requests_max=64, growth_tokens=64),
        cost=SimCost(
            step_overhead_s=0.008,
            prefill_token_s=1 / 15_000,
            decode_request_s=0.0002,
            context_token_s=4.4e-8,
            handoff_local_s=0.0005,
            handoff_token_s=TOKEN_BYTES / WIRE_BYTES_PER_S,
        ),
        tiers=(pool,),
        tick_s=1.0,
    )


@dataclass(slots=True)
class Counting:
    """Computes lengths, and counts prompt tokens that were computed."""

    inner: LengthEngine
    tokens: list[int]
    predictor: LengthEngine = field(init=False)

    def __post_init__(self) -> None:
        self.predictor = self.inner

    def execute(self, step: Step) -> StepResult:
        self.tokens[0] += sum(part.count for part in step.slices if part.count > 1)
        return self.inner.execute(step)

    def corrupt_kv(self, step: Step) -> None:
        """There are no bytes."""

    @property
    def layers(self) -> int:
        return self.inner.layers

    def compute_layers(self, step: Step, end: int) -> None:
        """There are no bytes."""

    def kv_of(self, table: Sequence[BlockId], slot: int, layers: LayerSpan | None = None) -> bytes:
        return b""

    def write(self, table: Sequence[BlockId], slot: int, kv: bytes, layers: LayerSpan | None = None) -> None:
        """There are no bytes."""


@dataclass(slots=True, kw_only=True)
class Clients:
    """So many clients, each of which asks again when it has its answer."""

    prompt_tokens: int
    left: int
    made: int = 0
    lives: list[Life] = field(default_factory=list[Life])
    lengths: dict[RequestId, int] = field(default_factory=dict[RequestId, int])

    def ask(self, cluster: SimCluster) -> None:
        if self.made == self.left:
            return
        prompt = array("I", range(1 + self.made * self.prompt_tokens, 1 + (self.made + 1) * self.prompt_tokens))
        request = Request(
            id=RequestId(f"request-{self.made}"),
            prompt_tokens=self.prompt_tokens,
            block_hashes=block_hashes(prompt, block_tokens=BLOCK_TOKENS),
            output_tokens_max=OUTPUT_TOKENS,
            arrived_at_s=cluster.loop.now_s,
            sampling=Sampling(),
        )
        self.made += 1
        self.lengths[request.id] = OUTPUT_TOKENS
        cluster.server.submit(request, prompt)

    def closed(self, cluster: SimCluster, life: Life) -> None:
        self.lives.append(life)
        self.ask(cluster)


Trouble = Callable[[SimCluster, Clients], None]


def nothing(cluster: SimCluster, clients: Clients) -> None:
    """All is well."""


def prefill_hosts_die(cluster: SimCluster, clients: Clients) -> None:
    """One after the other, every 3 s; each is back, empty, 2 s later."""

    def kill(turn: int) -> None:
        if len(clients.lives) < clients.left:
            cluster.kill_host(PREFILL_HOSTS[turn % 2], notice_s=0.01, restart_s=2.0)
            cluster.loop.after(3.0, partial(kill, turn + 1))

    cluster.loop.after(3.0, partial(kill, 0))


def wires_break(cluster: SimCluster, clients: Clients) -> None:
    """For the second half of every 4 s no KV goes from host to host. The pool is reached all the time."""
    pairs = [(one, other) for one in PREFILL_HOSTS for other in DECODE_HOSTS]

    def turn(*, is_cut: bool) -> None:
        for one, other in pairs:
            (cluster.wires.mend if is_cut else cluster.wires.cut)(one, other)
        if is_cut or len(clients.lives) < clients.left:
            cluster.loop.after(2.0, partial(turn, is_cut=not is_cut))

    cluster.loop.after(2.0, partial(turn, is_cut=False))


def play(
    policy: PolicyConfig, pool_bytes_per_s: float, asking: Clients, clients: int, trouble: Trouble = nothing
) -> dict[str, Any]:
    """Let all requests be answered. Returns what their clients have felt, and what it took."""
    spec = cluster_spec(pool_bytes_per_s)
    computed = [0]
    clusters: list[SimCluster] = []
    cluster = build_cluster(
        spec,
        configured_policies(policy, spec),
        lambda host: Counting(LengthEngine(asking.lengths), computed),
        seed=1,
        journal=Journal(keep_log=False),
        closed=lambda life: asking.closed(clusters[0], life),
    )
    clusters.append(cluster)
    for place in range(clients):
        cluster.loop.after(0.01 + 0.001 * place, partial(asking.ask, cluster))
    trouble(cluster, asking)
    cluster.loop.run(until_s=1e6, events_max=sys.maxsize)
    check_nothing_left(cluster)
    finished = [life for life in asking.lives if life.closes[0][1].outcome == "finished"]
    first_gaps_s = [life.token_times_s[1] - life.token_times_s[0] for life in finished]
    ended_s = max(life.closes[0][0] for life in asking.lives)
    return {
        "finished": len(finished),
        "ttft_s": statistics.mean(life.token_times_s[0] - life.request.arrived_at_s for life in finished),
        "first_gap_s": {"p50": statistics.median(first_gaps_s), "p99": sorted(first_gaps_s)[-len(first_gaps_s) // 100]},
        "e2e_s": statistics.mean(life.closes[0][0] - life.request.arrived_at_s for life in finished),
        "requests_per_s": len(finished) / ended_s,
        "computed_ratio": computed[0] / (asking.prompt_tokens * asking.left),
    }


def policies(way: str, *, streams: bool) -> PolicyConfig:
    policy = policy_set(way)
    if streams:
        return policy
    return replace(policy, streaming=Plugin(use="when-done"))


def simulated(requests: int, prompts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Play every situation in every way."""
    for (pool, pool_bytes_per_s), prompt_tokens, clients, streams in product(
        POOLS.items(), prompts, CLIENTS, (False, True)
    ):
        for way in WAYS:
            asking = Clients(prompt_tokens=prompt_tokens, left=requests)
            made = play(policies(way, streams=streams), pool_bytes_per_s, asking, clients)
            where = {"pool": pool, "prompt_tokens": prompt_tokens, "clients": clients}
            yield {**where, "while_computing": streams, "way": way, **made}


def troubled(requests: int) -> Iterator[dict[str, Any]]:
    """Play hosts that die and wires that break, in every way."""
    for trouble in (nothing, prefill_hosts_die, wires_break):
        for way in WAYS:
            asking = Clients(prompt_tokens=7500, left=requests)
            made = play(policies(way, streams=True), POOLS["100 Gb/s"], asking, 8, trouble)
            yield {"trouble": trouble.__name__, "way": way, **made}


WORDS = "Tell me everything that you know about the sea, the wind and the sails of ships. "
"""18 tokens."""
LIVE_PROMPTS = {"short": 12, "long": 50}
"""How often the words are said."""


@contextmanager
def pool_node() -> Iterator[str]:
    """Run `baton pool`. Yields its URL."""
    command = [sys.executable, "-m", "baton.cli.main", "pool", "--bytes", "1e9", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            yield node.stdout.readline().split()[-1]
        finally:
            node.terminate()


def ask_live(client: httpx.Client, name: str, repeats: int) -> dict[str, Any]:
    """Ask with a prompt that begins like no other."""
    body = {"prompt": f"{name}. {WORDS * repeats}", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return {**answer["timings"], "prompt_tokens": answer["usage"]["prompt_tokens"]}


def lived(way: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Ask a server of this policy, one request at a time."""
    hosts = {"a": ("--prefill", "1", "--threads", "1"), "b": ("--decode", "1", "--threads", "1")}
    with tempfile.TemporaryDirectory() as folder, pool_node() as url:
        path = Path(folder) / "baton.toml"
        path.write_text(f"policy.name = '{way}'\n[[tiers]]\nurl = '{url}'\n")
        given = ("--config", str(path))
        with real_hosts("smollm2-135m", hosts, *given) as (server, _), server.client(timeout_s=600) as client:
            ask_live(client, "first", 2)  # the first request of a server is no measure
            for name, repeats in LIVE_PROMPTS.items():
                made = [ask_live(client, f"{turn} {name}", repeats) for turn in range(rounds)]
                yield {
                    "way": way,
                    "prompt": name,
                    "prompt_tokens": made[0]["prompt_tokens"],
                    **{key: statistics.median(one[key] for one in made) for key in ("ttft_s", "handoff_s", "tpot_s")},
                    "handoff_s_all": [one["handoff_s"] for one in made],
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="real hosts instead of the simulator")
    parser.add_argument("--requests", type=int, default=60, help="of each simulated run")
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="tokens of simulated prompts")
    parser.add_argument("--rounds", type=int, default=5, help="of each live prompt")
    args = parser.parse_args()
    if args.live:
        rows = [row for way in WAYS for row in lived(way, args.rounds)]
        record.write("patterns-live", {"rounds": args.rounds, "rows": rows})
        return 0
    ways = list(simulated(args.requests, args.prompts))
    record.write("patterns", {"requests": args.requests, "ways": ways, "troubles": list(troubled(args.requests))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
