"""A simulated cluster as a TOML or YAML file: hosts, workers, KV blocks, what steps and copies cost, delays."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct, structs

from baton.core.config import BatchLimits, Preemption, Topology
from baton.core.errors import ConfigError
from baton.core.files import Form, form_of, in_file, keys_of
from baton.core.ports import CostModel
from baton.core.types import HostId, Role, WorkerId, WorkerView
from baton.core.validation import (
    Bandwidth,
    Count,
    Number,
    Price,
    Range,
    Ratio,
    Seconds,
    did_you_mean,
    out_of_range,
    type_problems,
)
from baton.decide.cost.heterogeneous import HeterogeneousCost
from baton.decide.cost.load import LoadedCost, inline_files, load_cost
from baton.decide.cost.spec import LinearSpec, Overhead
from baton.decide.kv.tier import TierRules
from baton.decide.kv.window import PromptRules, Window, request_tokens_max

HOST = HostId("host-0")
"""Where workers are whose host is not named."""
WORKERS_MAX = 100_000
"""Of one cell. Each is made before the first request comes: a slip in a count would take all memory."""


class SimKV(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arena."""

    blocks: Count = 4096
    block_tokens: Count = 16


class SimLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a message between the server and a worker is under way: uniform between two bounds."""

    delay_min_s: Seconds = 0.0002
    delay_max_s: Seconds = 0.0006


class SimEdge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies between a client and the deciding half: HTTP, tokenizing, text. Measured, where it is to be told."""

    request_s: Seconds = 0.0
    """From the client's sending to the request's arrival at the coordinator."""
    prompt_token_s: Seconds = 0.0
    """More of that, per token of the prompt."""
    token_s: Seconds = 0.0
    """From the server's hearing of a token to its being on the client's socket."""

    def before_s(self, prompt_tokens: int) -> float:
        """How long a request of so many tokens is under way to the coordinator."""
        return self.request_s + self.prompt_token_s * prompt_tokens


class SimWire(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies between hosts. How long one takes alone, the cost model says."""

    overlap_ratio: Ratio = 0.0
    """Share of its prefill's time under which a prompt's KV is already sent: (layers - 1) / layers where it goes layer
    by layer, 0 where it goes when all of it is computed."""
    residue_s: Seconds = 0.005
    """What is exposed of such a copy at least."""


class SimTier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below the arena of every host."""

    name: str = "file"
    blocks: Count = 65_536
    latency_s: Seconds = 0.001
    """From asking a store to its first byte."""
    bytes_per_s: Bandwidth = 1.7e9
    """Of a write or a read, one at a time."""
    host_bytes_per_s: Annotated[float, Range(least=0.0)] = 0.0
    """Of one host's way to it, where a store of several hosts has more than one of them can use. 0: as much."""
    token_bytes: Count = 131_072
    """KV of a token: 131,072 of Llama-3.1-8B in bfloat16."""
    shared: bool = False
    """One store of all hosts, not one each."""
    when: Literal["cached", "sealed"] = "cached"
    """Blocks are written when nobody uses them any more, or as soon as they are sealed."""
    answer_s: Annotated[float, Range(above=0.0, such_as="seconds, such as 5")] = 5.0
    """A store that has not answered for so long is answered for. No read is begun that is predicted to take half."""

    def rules(self, block_tokens: int) -> TierRules:
        """What a pool has to know of it."""
        block_s = block_tokens * self.token_bytes / min(self.bytes_per_s, self.host_bytes_per_s or math.inf)
        return TierRules(
            name=self.name,
            blocks_max=self.blocks,
            latency_s=self.latency_s,
            block_load_s=block_s,
            load_s_max=self.answer_s / 2,
            shared_as=self.name if self.shared else "",
            when=self.when,
        )


class SimWorkers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike."""

    role: Role
    count: Number = 1
    kind: str = ""
    """One of `kinds`. Empty: what `cost`, `kv` and `batch` say."""
    host: str = HOST
    """The host that they share. `each`: every one has a host, and so an arena, of its own."""


class SimKind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one kind of worker is."""

    cost: dict[str, Any]
    """As `baton.decide.cost.load` takes it: a model by name, and what it needs to know."""
    kv: SimKV | None = None
    """Arena of a host whose first worker is of this kind, whatever else is there. None: what fits beside the weights of
    all the host's workers, where their cost models know that, otherwise the cluster's `kv`."""
    batch: BatchLimits | None = None


class SimCost(LinearSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of workers that are of no kind. By default round numbers of a small model."""

    step_overhead_s: Overhead = 0.040
    prefill_token_s: Price = 0.0019
    prefill_pair_s: Price = 0.0
    decode_request_s: Price = 0.004


class ClusterSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulated cluster can be told."""

    topology: Topology = Topology(prefill=1, decode=1)
    kv: SimKV = SimKV()
    window: Window | None = None
    """How far back the model sees, where no layer sees everything: blocks behind it are let go."""
    preemption: Preemption = "cheaper"
    """How preempted requests get their KV back: see `kv.preemption` of a server's configuration."""
    batch: BatchLimits = BatchLimits()
    cost: SimCost = SimCost()
    link: SimLink = SimLink()
    wire: SimWire = SimWire()
    edge: SimEdge = SimEdge()
    tiers: tuple[SimTier, ...] = ()
    """Below every host's arena, the fastest first."""
    workers: tuple[SimWorkers, ...] = ()
    """Instead of `topology`, where hosts or kinds differ."""
    kinds: dict[str, SimKind] = {}
    cells: Count = 1
    """The file describes one cell; the cluster is so many of them, each with its own server and its own hosts."""
    layers: Count = 1
    """Of the model, as far as its prompts' KV is sent ahead by layer. 1: it goes over when a chunk is computed."""
    tick_s: Annotated[float, Range(least=0.001, such_as="seconds, such as 1")] = 1.0
    """How often policies of roles, scaling and moves are asked."""
    folder: str = ""
    """Where files are that `kinds` name: the cluster file's own."""
    worker_start_s: Seconds = 30.0
    """How long a worker takes from being asked for to being ready."""
    queue_requests_max: Count = 1024
    """Most requests in the cluster; more are rejected."""
    wait_s: Seconds = 60.0
    """How long a request waits while no worker is there; then it is rejected."""
    output_tokens_max: Count | None = None
    """What every simulated client asks for at most: no policy can tell a short answer from a long one. None: 4,096, or
    what the longest answer of the trace needs."""

    @property
    def request_tokens_max(self) -> int:
        """Most tokens, prompt and output together, that every host can hold for one request, or hold a window of."""
        blocks, block_tokens = min(self.kv_of(host).blocks for host in self.hosts()), self.kv.block_tokens
        most = request_tokens_max(self.window, blocks * block_tokens, block_tokens)
        return sys.maxsize if most is None else most

    @property
    def prompt_rules(self) -> PromptRules:
        """What every host's pool has to know of prompts."""
        return PromptRules(
            hash_tokens=self.kv.block_tokens,
            window=self.window,
            growth_tokens=self.batch.growth_tokens,
            preemption=self.preemption,
        )

    def views(self) -> list[WorkerView]:
        """The workers."""
        return [view for group, views in self._groups() for view in views if group.count > 0]

    def hosts(self) -> list[HostId]:
        """The hosts, in the order of their first workers."""
        return list(dict.fromkeys(view.host for view in self.views()))

    def kv_of(self, host: HostId) -> SimKV:
        """The arena of a host: that of the kind of its first worker, if that has one, otherwise what fits beside the
        weights of all its workers together, which share it."""
        return self._kv_of_kinds([view.kind for view in self.views() if view.host == host])

    def kv_of_kind(self, kind: str) -> SimKV:
        """The arena of a host that is opened for one worker of this kind."""
        return self._kv_of_kinds([kind])

    def _kv_of_kinds(self, names: list[str]) -> SimKV:
        """The arena of workers of these kinds, the first first."""
        first = self.kinds.get(names[0]) if names else None
        if first is None:
            return self.kv
        if first.kv is not None:
            return first.kv
        tokens = sum(count * self._room_tokens(name) for name, count in Counter(names).items())
        return structs.replace(self.kv, blocks=tokens // self.kv.block_tokens) if tokens else self.kv

    def _room_tokens(self, name: str) -> int:
        """Tokens of KV beside the weights of one worker. 0: its cost model does not know, or it is of no kind."""
        kind = self.kinds.get(name)
        return 0 if kind is None else self._load(kind).kinds[""].kv_tokens_max

    def _load(self, kind: SimKind) -> LoadedCost:
        return load_cost(kind.cost, folder=Path(self.folder))

    def batch_of(self, kind: str) -> BatchLimits:
        """How large a step of this kind of worker may be."""
        found = self.kinds.get(kind)
        return found.batch if found is not None and found.batch is not None else self.batch

    def cost_model(self) -> CostModel:
        """What steps and copies cost. Raises ConfigError with everything that is wrong with a kind's cost."""
        usual = self.cost.model()
        if not self.kinds:
            return usual
        kinds = {name: self._load(kind).cost for name, kind in self.kinds.items()}
        if any(not view.kind for view in self.views()):
            kinds[""] = usual
        return HeterogeneousCost(kinds=kinds)

    def _asked(self) -> tuple[SimWorkers, ...]:
        topology = self.topology
        return self.workers or (
            SimWorkers(role="prefill", count=topology.prefill),
            SimWorkers(role="decode", count=topology.decode),
            SimWorkers(role="mixed", count=topology.mixed),
        )

    def _groups(self) -> list[tuple[SimWorkers, list[WorkerView]]]:
        numbers: Counter[Role] = Counter()
        groups: list[tuple[SimWorkers, list[WorkerView]]] = []
        for group in self._asked():
            views: list[WorkerView] = []
            for _ in range(group.count):
                name = f"{group.role}-{numbers[group.role]}"
                numbers[group.role] += 1
                host = HostId(f"host-of-{name}" if group.host == "each" else group.host)
                views.append(WorkerView(id=WorkerId(name), host=host, role=group.role, kind=group.kind))
            groups.append((group, views))
        return groups

    def problems(self) -> list[str]:
        """Everything that is wrong with it. Empty means ready to simulate."""
        found = out_of_range(self)
        link = self.link
        if link.delay_max_s < link.delay_min_s:
            found.append(
                f"link.delay_max_s is {link.delay_max_s:g}, but must be at least {link.delay_min_s:g}, as "
                "link.delay_min_s is"
            )
        topology, workers = self.topology, sum(max(0, group.count) for group in self._asked())
        if min(topology.prefill, topology.decode, topology.mixed) < 0 or not workers:
            found.append("topology has no worker: set prefill and decode, or mixed, to 1 or more")
        if workers > WORKERS_MAX:
            found.append(
                f"there are over {WORKERS_MAX:,} workers, more than one server may have: divide them into cells"
            )
        found += [
            f"workers name the kind {group.kind!r}, which `kinds` does not have{did_you_mean(group.kind, self.kinds)}"
            for group in self.workers
            if group.kind and group.kind not in self.kinds
        ]
        names = [tier.name for tier in self.tiers]
        found += [
            f"two tiers have the name {name!r}" for name in sorted({name for name in names if names.count(name) > 1})
        ]
        return found + self._kind_problems()

    def _kind_problems(self) -> list[str]:
        found: list[str] = []
        for name, kind in self.kinds.items():
            if kind.kv is not None and kind.kv.block_tokens % self.kv.block_tokens:
                found.append(
                    f"kinds.{name}.kv.block_tokens is {kind.kv.block_tokens}, kv.block_tokens {self.kv.block_tokens}: "
                    "a kind's block is as many tokens or a multiple of them"
                )
            try:
                load_cost(kind.cost, folder=Path(self.folder), where=f"kinds.{name}.cost")
            except ConfigError as error:
                found += str(error).splitlines()
        return found


def read_spec(path: Path) -> ClusterSpec:
    """Read a cluster file, `.toml`, `.yaml` or `.json`. Raises ConfigError with every problem, each beside its name."""
    with in_file(path, "the cluster"):
        return load_spec(path.read_text(encoding="utf-8"), form=form_of(path), folder=str(path.parent))


def load_spec(text: str, *, form: Form = "toml", folder: str = "") -> ClusterSpec:
    """Decode and check a cluster file's text. Raises ConfigError with every problem that was found, one per line."""
    raw = keys_of(text, form, example="`topology` with `prefill = 1` below")
    if not raw:
        raise ConfigError("the cluster file is empty: say at least how many workers there are, in `topology`")
    wrong = type_problems(raw, ClusterSpec)
    if wrong:
        raise ConfigError("\n".join(f"not a valid cluster: {problem}" for problem in wrong))
    spec = msgspec.convert({"folder": folder, **raw}, ClusterSpec)
    problems = spec.problems()
    if spec.workers and "topology" in raw:
        problems.append(
            "topology and workers both say which workers there are, and workers alone would count: leave topology out, "
            "and write what it says as workers with a role and a count"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    here = Path(spec.folder)
    kinds = {
        name: structs.replace(kind, cost=inline_files(kind.cost, folder=here)) for name, kind in spec.kinds.items()
    }
    return structs.replace(spec, kinds=kinds, folder="")  # whatever was named there is in it now
