"""Cluster files of the simulator (TOML, YAML or JSON): workers, hosts, KV blocks, costs and delays."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct, structs

from baton.core.class_config import ClassConfig, RouteConfig, class_problems
from baton.core.config import BatchLimits, Topology
from baton.core.errors import ConfigError
from baton.core.files import Form, form_of, in_file, keys_of
from baton.core.kv_config import Preemption
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
from baton.decide.control.cell_router import CellRules
from baton.decide.control.start_queue import StartQueue
from baton.decide.cost.fitted import FittedCost
from baton.decide.cost.linear import LinearCost, Overhead
from baton.decide.cost.load import HeterogeneousCost, LoadedCost, inline_files, load_cost
from baton.decide.cost.noise import StepNoise
from baton.decide.kv.tier import TierRules
from baton.decide.kv.window import PromptRules, Window, request_tokens_max
from baton.lab.sim.spill import SimSpill

HOST = HostId("host-0")
"""Host of workers whose host is not named."""
WORKERS_MAX = 100_000
"""Workers per cell. All are created before the first request, so a typing error in a count could exhaust memory."""


class SimKV(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a host's arena."""

    blocks: Count = 4096
    block_tokens: Count = 16


class SimLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delay of a message between the server and a worker: uniform between two bounds."""

    delay_min_s: Seconds = 0.0002
    delay_max_s: Seconds = 0.0006


class SimEdge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency between a client and the coordinator: HTTP, tokenizing and detokenizing. Set it to measured values."""

    request_s: Seconds = 0.0
    """Time from the client's sending to the request's arrival at the coordinator."""
    prompt_token_s: Seconds = 0.0
    """Added to `request_s` per prompt token."""
    token_s: Seconds = 0.0
    """Time from the server's receipt of a token until it is on the client's socket."""

    def before_s(self, prompt_tokens: int) -> float:
        """Return the time until a request of this length reaches the coordinator."""
        return self.request_s + self.prompt_token_s * prompt_tokens


class SimWire(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a copy between hosts that overlaps the prefill of its KV.

    The cost model gives the duration of a copy alone.
    """

    overlap_ratio: Ratio = 0.0
    """Share of the prefill time during which the prompt's KV is already sent.

    (layers - 1) / layers if KV is sent by layer, 0 if it is sent after the prefill."""
    residue_s: Seconds = 0.005
    """Minimum part of a copy's time that does not overlap its prefill."""


class SimTier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below the arena of every host, in its own store or in a shared one."""

    name: str = "file"
    blocks: Count = 65_536
    latency_s: Seconds = 0.001
    """Time from a request to a store until its first byte."""
    bytes_per_s: Bandwidth = 1.7e9
    """Bandwidth of the store, which performs one read or write at a time."""
    host_bytes_per_s: Annotated[float, Range(least=0.0)] = 0.0
    """Bandwidth of one host's link to a shared store, if it is below `bytes_per_s`. 0: the same as `bytes_per_s`."""
    token_bytes: Count = 131_072
    """KV of one token as the tier stores it: less with a rounded format. Default: Llama-3.1-8B in bfloat16."""
    shared: bool = False
    """True: all hosts share one store. False: each host has its own."""
    when: Literal["cached", "sealed"] = "cached"
    """When blocks are written: once no request uses them, or as soon as they are sealed."""
    answer_s: Annotated[float, Range(above=0.0, such_as="seconds, such as 5")] = 5.0
    """Timeout of a store, after which a read or write fails. A read predicted to exceed half of it is not begun."""

    def rules(self, block_tokens: int) -> TierRules:
        """Return the tier's parameters for a host pool."""
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
    """A group of identical workers."""

    role: Role
    count: Number = 1
    kind: str = ""
    """A name in `kinds`. Empty: the cluster's `cost`, `kv` and `batch` apply."""
    host: str = HOST
    """The host that they share. `each`: every worker has its own host, and so its own arena."""


class SimKind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware of one kind of worker."""

    cost: dict[str, Any]
    """The name of a cost model and its parameters, in the format of `baton.decide.cost.load`."""
    kv: SimKV | None = None
    """Arena of a host whose first worker is of this kind.

    None: the memory that the weights of the host's workers leave, if their cost models know it, else the cluster's
    `kv`."""
    batch: BatchLimits | None = None
    noise: StepNoise | None = None
    """How step times scatter. None: as in the step logs that the cost model was fitted to; not at all without logs."""


class SimCost(LinearCost, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost model of workers without a kind. The defaults are round numbers for a small model."""

    step_overhead_s: Overhead = 0.040
    prefill_token_s: Price = 0.0019
    prefill_pair_s: Price = 0.0
    decode_request_s: Price = 0.004


class ClusterSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a cluster file."""

    topology: Topology = Topology(prefill=1, decode=1)
    kv: SimKV = SimKV()
    window: Window | None = None
    """The model's attention window, if all its layers have one. Blocks behind the window are released."""
    preemption: Preemption = "cheaper"
    """How preempted requests get their KV back. Same as `kv.preemption` of a server's configuration."""
    batch: BatchLimits = BatchLimits()
    cost: SimCost = SimCost()
    link: SimLink = SimLink()
    wire: SimWire = SimWire()
    edge: SimEdge = SimEdge()
    tiers: tuple[SimTier, ...] = ()
    """Tiers below every host's arena, fastest first."""
    spill: SimSpill | None = None
    """Space for cold KV of running requests on every host. None: there is none."""
    workers: tuple[SimWorkers, ...] = ()
    """Replaces `topology` if hosts or kinds differ."""
    kinds: dict[str, SimKind] = {}
    cells: Count = 1
    """Number of cells. The file describes one cell, and each cell has its own server and hosts."""
    router: CellRules | None = None
    """Rules of `baton cells`, which deals the requests. None: requests are dealt in turn, sessions by their names."""
    layers: Count = 1
    """Layers of the model, for sending KV ahead by layer. 1: KV is sent after each chunk."""
    tick_s: Annotated[float, Range(least=0.001, such_as="seconds, such as 1")] = 1.0
    """Interval of the policies of roles, scaling and moves."""
    folder: str = ""
    """Folder of the files that `kinds` name: that of the cluster file."""
    worker_start_s: Seconds = 30.0
    """Time from a request for a new worker until it is ready."""
    workers_max: Number = 0
    """Maximum number of workers of each host, as a live host states it. 0: no limit."""
    workers_at_once: Number = 0
    """Workers that run steps at full speed at once on a host's shared cores. 0: all."""
    queue_requests_max: Count = 1024
    """Maximum of open requests in the cluster. More are rejected."""
    wait_s: Seconds = 60.0
    """Maximum wait of a request while no worker is available. Then it is rejected."""
    queue_s: Seconds | None = None
    """Maximum wait for a request's first step, as `limits.queue_s` of a server. None: no limit."""
    classes: tuple[ClassConfig, ...] = ()
    """Service classes, as in a server's configuration."""
    routes: tuple[RouteConfig, ...] = ()
    """Routes to them. A simulated request has a tenant only."""
    default_class: str = ""
    output_tokens_max: Count | None = None
    """Output limit of every request, so that no policy can tell a short answer from a long one.

    None: 4,096, or the longest answer of the trace if that is more."""

    def start_queue(self) -> StartQueue:
        """Return the empty queue of the cluster's server."""
        return StartQueue(self.queue_s)

    @property
    def request_tokens_max(self) -> int:
        """Longest request, prompt and output, that every host can hold. With a window it may be unbounded."""
        blocks, block_tokens = min(self.kv_of(host).blocks for host in self.hosts()), self.kv.block_tokens
        spill = None if self.spill is None else self.spill.rules(block_tokens)
        most = request_tokens_max(self.window, blocks * block_tokens, block_tokens, spill)
        return sys.maxsize if most is None else most

    @property
    def prompt_rules(self) -> PromptRules:
        """Rules for prompts in every host's pool."""
        return PromptRules(
            hash_tokens=self.kv.block_tokens,
            window=self.window,
            growth_tokens=self.batch.growth_tokens,
            preemption=self.preemption,
            spill=None if self.spill is None else self.spill.rules(self.kv.block_tokens),
        )

    def views(self) -> list[WorkerView]:
        """Return the initial workers."""
        return [view for group, views in self._groups() for view in views if group.count > 0]

    def hosts(self) -> list[HostId]:
        """Return the hosts, in the order of their first workers."""
        return list(dict.fromkeys(view.host for view in self.views()))

    def kv_of(self, host: HostId) -> SimKV:
        """Return the size of a host's arena, which its workers share.

        It is the `kv` of the first worker's kind, if it has one; else the memory that the weights of all workers leave,
        if that is known; else the cluster's own `kv`.
        """
        return self._kv_of_kinds([view.kind for view in self.views() if view.host == host])

    def kv_of_kind(self, kind: str) -> SimKV:
        """Return the size of the arena of a host that is opened for one worker of this kind."""
        return self._kv_of_kinds([kind])

    def _kv_of_kinds(self, names: list[str]) -> SimKV:
        """Return the size of the arena that workers of these kinds share. The first kind takes precedence."""
        first = self.kinds.get(names[0]) if names else None
        if first is None:
            return self.kv
        if first.kv is not None:
            return first.kv
        tokens = sum(count * self._room_tokens(name) for name, count in Counter(names).items())
        return structs.replace(self.kv, blocks=tokens // self.kv.block_tokens) if tokens else self.kv

    def _room_tokens(self, name: str) -> int:
        """Return the tokens of KV that fit beside one worker's weights. 0: there is no such kind, or it is unknown."""
        kind = self.kinds.get(name)
        return 0 if kind is None else self._load(kind).kinds[""].kv_tokens_max

    def _load(self, kind: SimKind) -> LoadedCost:
        return load_cost(kind.cost, folder=Path(self.folder))

    def batch_of(self, kind: str) -> BatchLimits:
        """Return the batch limits of this kind of worker."""
        found = self.kinds.get(kind)
        return found.batch if found is not None and found.batch is not None else self.batch

    def noise_of(self, kind: str) -> StepNoise | None:
        """Return how the step times of this kind of worker scatter. None: not at all."""
        found = self.kinds.get(kind)
        if found is None or found.noise is not None:
            return None if found is None else found.noise
        cost = self._load(found).cost
        return cost.noise if isinstance(cost, FittedCost) else None

    def cost_model(self) -> CostModel:
        """Return the cost model of steps and copies. Raises ConfigError with every problem of a kind's cost."""
        if not self.kinds:
            return self.cost
        kinds: dict[str, CostModel] = {name: self._load(kind).cost for name, kind in self.kinds.items()}
        if any(not view.kind for view in self.views()):
            kinds[""] = self.cost
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
        """Return all errors of the file. Empty: ready to simulate."""
        found = out_of_range(self) + class_problems(self.classes, self.routes, self.default_class)
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
        if self.spill is not None and (self.window is not None or len(self.hosts()) > 1):
            found.append("spill is for one host and a model without an attention window: leave out `spill`")
        return found + self._kind_problems()

    def _kind_problems(self) -> list[str]:
        found: list[str] = []
        for name, kind in self.kinds.items():
            if kind.kv is not None and kind.kv.block_tokens % self.kv.block_tokens:
                found.append(
                    f"kinds.{name}.kv.block_tokens is {kind.kv.block_tokens}, kv.block_tokens {self.kv.block_tokens}: "
                    "a kind's block must have as many tokens, or a multiple"
                )
            try:
                load_cost(kind.cost, folder=Path(self.folder), where=f"kinds.{name}.cost")
            except ConfigError as error:
                found += str(error).splitlines()
        return found


def read_spec(path: Path) -> ClusterSpec:
    """Return the cluster of a `.toml`, `.yaml` or `.json` file. Raises ConfigError with every problem and the file."""
    with in_file(path, "the cluster"):
        return load_spec(path.read_text(encoding="utf-8"), form=form_of(path), folder=str(path.parent))


def load_spec(text: str, *, form: Form = "toml", folder: str = "") -> ClusterSpec:
    """Decode and check the text of a cluster file. Raises ConfigError with every problem, one a line."""
    raw = keys_of(text, form, example="`topology` with `prefill = 1` below")
    if not raw:
        raise ConfigError("the cluster file is empty: give at least the number of workers, in `topology`")
    wrong = type_problems(raw, ClusterSpec)
    if wrong:
        raise ConfigError("\n".join(f"not a valid cluster: {problem}" for problem in wrong))
    spec = msgspec.convert({"folder": folder, **raw}, ClusterSpec)
    problems = spec.problems()
    if spec.workers and "topology" in raw:
        problems.append(
            "topology and workers are both given, but only workers would be used: leave topology out, and list its "
            "workers in workers, with a role and a count"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    here = Path(spec.folder)
    kinds = {
        name: structs.replace(kind, cost=inline_files(kind.cost, folder=here)) for name, kind in spec.kinds.items()
    }
    return structs.replace(spec, kinds=kinds, folder="")  # the named files are inlined now
