"""The one configuration tree: from a TOML file and the command line, frozen, checked whole before anything starts."""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct

from baton.core.ranges import Count

DtypeChoice = Literal["auto", "float32", "bfloat16"]
DEVICE = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?")
WeightsChoice = Literal["dense", "stored", "int8"]
IdleCores = Literal["lend", "keep"]
KVDtypeChoice = Literal["auto", "float32", "bfloat16", "int8", "fp8"]


class BatchLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large one step may be."""

    step_tokens_max: Count = 512
    """Most tokens in one forward pass. Larger computes prompts faster; smaller keeps ITL steady on mixed workers."""
    requests_max: Count = 64
    """Most requests that a worker runs at once."""
    growth_tokens: Count = 64
    """Room for KV that a decoding request asks for at a time. More asks less often; less leaves more to others."""


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Guessing tokens ahead from the request's own text (prompt lookup). Changes no text, only the number of steps."""

    tokens_max: int = 0
    """Most guesses that a step verifies for one decoding request. 0: none are made."""
    ngram_min: int = 2
    """Newest tokens that must have stood in the text before, for a guess of what followed them."""
    ngram_max: int = 4
    """Newest tokens that are looked for first; fewer, down to `ngram_min`, where they are not found."""
    requests_max: int = 4
    """Most decoding requests in a step with guesses. A step with more of them has its cores busy without."""


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many worker processes of each role. All zero means 1 prefill + 1 decode."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes that compute one model together. All workers of a host are alike in it: it decides how KV lies."""

    tensor: int = 1
    """Ranks that share the heads and the width of every layer."""
    pipeline: int = 1
    """Stages that share the layers."""


Preemption = Literal["cheaper", "swap", "recompute"]
"""How a preempted request gets its KV back."""


class KVConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arena that holds the KV cache."""

    block_tokens: int = 16
    """Tokens in a KV block. Only full blocks are shared between requests."""
    bytes: int = 0
    """Size of the arena. 0 chooses: 2 GiB or one full context, at most a quarter of the free memory."""
    blocks: int = 0
    """Size of the arena in blocks; overrides `bytes` where it is not 0."""
    allocate: Literal["on_demand", "longest"] = "on_demand"
    """`on_demand` gives a request blocks as it grows, and preempts where they run out. `longest` gives it at the start
    what its longest output can need: no preemption, fewer requests at once."""
    preemption: Preemption = "cheaper"
    """How a preempted request gets back what it has lost when it goes on: `recompute` computes it again, `swap` reads
    what a tier below the arena has of it, `cheaper` does what costs it and those in its batch less time."""
    dtype: KVDtypeChoice = "auto"
    """`auto` keeps KV in the precision that the model computes in. `int8` and `fp8` (e4m3) have a scale per token and
    head, and need the native engine."""


class TierConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below the arena of the server's own host, and of all others where it is on none of their machines: blocks
    that nobody uses are written there, and read again where that is predicted cheaper than computing them."""

    url: str
    """A store: `file:///var/cache/kv?bytes=100e9`, `redis://host:6379/0?ttl_s=3600`, `s3://bucket/prefix`,
    `pool://host:8700`."""
    bytes_per_s: float = 1e9
    """How fast it is read, as far as is known before the first read; then it is measured."""
    latency_s: float = 0.002
    """From asking for a block to its first byte. Measured, too."""
    when: Literal["cached", "sealed"] = "cached"
    """Blocks are written when nobody uses them any more, or as soon as they are full."""
    list_s: float = 30.0
    """How often a store that others use too is asked what it has: what they put there is found so much later, or 20
    times as much as its answer takes. 0: only at the start."""


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port and says which."""
    api_keys: tuple[str, ...] = ()
    """Accepted bearer keys. Empty: no key is asked for."""
    body_bytes_max: int = 4 * 1024 * 1024
    """Larger request bodies are refused with 413 without being read."""
    choices_max: int = 32
    """Most choices (prompts x n) of one HTTP request."""


class Plugin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of ours or of the user's, by name, with the options that build it."""

    use: str
    """`module:Class`."""
    options: dict[str, Any] = {}


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy per family: what plays. The defaults are what plays where nothing is chosen.

    One class that is named, with the same options, for several families is made once and plays all of them.
    """

    name: str = ""
    """What the set is called that most of it is of; everything that it says stands below."""
    admission: Plugin = Plugin(use="slo-headroom")
    routing: Plugin = Plugin(use="slo-headroom")
    placement: Plugin = Plugin(use="slo-headroom")
    fairness: Plugin = Plugin(use="slo-order")
    batching: Plugin = Plugin(use="slo-chunked")
    eviction: Plugin = Plugin(use="lru")
    roles: Plugin = Plugin(use="static-roles")
    scaling: Plugin = Plugin(use="fixed-fleet")
    moves: Plugin = Plugin(use="no-moves")
    lengths: Plugin = Plugin(use="recent-mean")
    streaming: Plugin = Plugin(use="while-computing")
    handoff: Plugin = Plugin(use="cheapest-handoff")
    first_token: Plugin = Plugin(use="first-token-by-prefill")


class PolicyChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user chooses of the policies, by family: a class of ours, or the user's own `module:Class`.

    What is not chosen comes from the set that `name` says, and without a name it is the default of docs/policies.md.
    One class that is named, with the same options, for several families is made once and plays all of them.
    """

    name: str = ""
    """A whole set by name, as `baton sim --policy` takes it (docs/policies.md). What is given per family wins over it.
    Empty: the defaults."""
    admission: Plugin | None = None
    routing: Plugin | None = None
    placement: Plugin | None = None
    fairness: Plugin | None = None
    batching: Plugin | None = None
    eviction: Plugin | None = None
    roles: Plugin | None = None
    scaling: Plugin | None = None
    moves: Plugin | None = None
    lengths: Plugin | None = None
    streaming: Plugin | None = None
    handoff: Plugin | None = None
    first_token: Plugin | None = None


class HooksConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pre-processing of requests and post-processing of outputs, in order."""

    request: tuple[Plugin, ...] = ()
    output: tuple[Plugin, ...] = ()


class SloConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the service promises. With both given, requests that cannot meet TTFT are refused at once (503)."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class SurvivalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is done about dead and silent workers."""

    attempts_max: int = 3
    """Tries that a request gets when workers die under it. The last failure is reported to the client."""
    restarts_max: int = 5
    """Times that one worker is started again within `restart_window_s` before the server gives it up."""
    restart_window_s: float = 60.0
    silent_s: float = 60.0
    """A worker that answers nothing for this long (between two steps) is killed; its requests go on elsewhere."""
    start_s: float = 300.0
    """Longest time that a worker may take to load its model."""
    wait_s: float = 60.0
    """Longest time that a request which was taken waits while no worker is there: all have died, or every host has
    gone. Then its client gets 503 with the reason. While a worker starts, or a host joins, `start_s` longer."""
    drain_s: float = 10.0
    """How long running requests may go on after SIGTERM or Ctrl-C. A second signal ends them at once."""


class HostsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other hosts that serve under this server: `baton host --join URL`."""

    expected: int = 0
    """Hosts that must have joined before the server is ready. With some, `topology` may be empty: no worker here."""
    port: int = 0
    """Where hosts that join connect to, at the address of HTTP. 0 takes a free one; open once a host has asked."""
    listen: str = ""
    """Address at which this server's own host gives KV blocks to others. Empty: that of HTTP."""
    transports: tuple[Literal["shm", "tcp", "nixl"], ...] = ("shm", "tcp")
    """How KV may go from host to host, the best first. `shm` is between hosts on one machine; `nixl` needs the extra of
    that name on every host."""
    advertise: str = ""
    """Address by which they reach it. Empty: the one by which the first of them has reached the server."""
    silent_s: float = 10.0
    """A host that answers nothing for this long is given up, with its KV; its requests go on elsewhere."""
    copy_s: float = 30.0
    """Longest time that copying a request's KV between two hosts may take. What is not there then is computed again."""
    lossy: bool = False
    """Let a host keep KV in another precision. `timings.kv_loss` of a request then says what its KV lost on the way;
    whoever finds such blocks in the cache later reads what was rounded."""
    mover_silent_s: float = 5.0
    """A process that moves KV and answers nothing for this long is killed, and started again."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `baton serve` can be told."""

    model: str = "smollm2-135m"
    served_name: str = ""
    """What clients call the model. Empty: the name of the model or of its file."""
    dtype: DtypeChoice = "auto"
    """Precision that the model computes in. `auto` is float32 on a CPU, bfloat16 on a GPU."""
    weights: WeightsChoice = "dense"
    """Form that weights are computed in. `dense`: widened to `dtype`. `stored`: 4 and 8 bits as a GGUF file has them,
    what it has otherwise rounded to 8. `int8`: 8 bits, a scale per row. The last two need the native engine, and `auto`
    for `dtype` is bfloat16 then."""
    device: str = "auto"
    """Where it computes: `cpu`, `cuda` or `cuda:N`. `auto` is the first GPU that PyTorch can use, else the CPU."""
    threads: int = 0
    """Threads of each worker. 0 divides the cores among the workers, at least one each; where a container has a CPU
    quota, as many as that is worth."""
    idle_cores: IdleCores = "lend"
    """What a worker's cores do while it sleeps. `lend`: the native engine of another worker of the host computes on
    them, until the owner wakes. `keep`: nothing."""
    context_tokens: int = 0
    """Most tokens of one request, prompt and output together. 0: what the model was trained for."""
    seed: int | None = None
    """Where sampling seeds of requests without one come from. None: from the operating system."""
    tick_s: float = 1.0
    """How often policies of roles, scaling and moves are asked."""
    log: str = ""
    """File for the log of decisions, which `baton replay` reads. Empty: none is written."""
    log_bytes_max: int = 1_000_000_000
    """Where a log ends, however long the server runs."""
    step_log: str = ""
    """Folder for the logs of steps, one file per worker, which `fitted` cost models are made of. Empty: none."""
    topology: Topology = Topology()
    parallel: ParallelConfig = ParallelConfig()
    kv: KVConfig = KVConfig()
    tiers: tuple[TierConfig, ...] = ()
    """Below the arena, the fastest first."""
    batch: BatchLimits = BatchLimits()
    speculation: SpeculationConfig = SpeculationConfig()
    cost: dict[str, Any] = {}
    """How long steps take on this machine: `model`, and its values. Empty, or without some prices of the linear model:
    those come from the sizes of the served model, at rates of another machine."""
    http: HttpConfig = HttpConfig()
    policy: PolicyChoice = PolicyChoice()
    hooks: HooksConfig = HooksConfig()
    slo: SloConfig = SloConfig()
    survival: SurvivalConfig = SurvivalConfig()
    hosts: HostsConfig = HostsConfig()

    def problems(self) -> list[str]:
        """Everything that is wrong, not only the first thing. Empty means ready to start."""
        found: list[str] = []
        for path, value, low, high in self._ranges():
            if not low <= value <= high:
                found.append(f"{path} is {value}, but must be between {low} and {high}")
        if DEVICE.fullmatch(self.device) is None:
            found.append(f"device is {self.device!r}, but must be auto, cpu, cuda or cuda:N")
        topology = Topology(mixed=1) if self.hosts.expected else self.topology  # others may bring what is missing
        if topology.prefill > 0 and topology.decode + topology.mixed == 0:
            found.append(f"{topology.prefill} prefill workers and nobody to decode: add --decode N or --mixed N")
        if topology.decode > 0 and topology.prefill + topology.mixed == 0:
            found.append(f"{topology.decode} decode workers and nobody to prefill: add --prefill N or --mixed N")
        if (self.slo.ttft_s is None) != (self.slo.tpot_s is None):
            found.append("slo needs both ttft_s and tpot_s: a request is in its SLO when it meets both")
        if any(value is not None and not value > 0 for value in (self.slo.ttft_s, self.slo.tpot_s)):
            found.append(
                f"slo.ttft_s is {self.slo.ttft_s} and slo.tpot_s {self.slo.tpot_s}, but both must be above 0 s"
            )
        for number, tier in enumerate(self.tiers):
            if not (tier.bytes_per_s > 0 and tier.latency_s >= 0):
                found.append(
                    f"tiers[{number}]: bytes_per_s is {tier.bytes_per_s:g} and latency_s {tier.latency_s:g}, but they"
                    " must be above 0, and at least 0"
                )
            if not 0 <= tier.list_s <= 86400:
                found.append(f"tiers[{number}].list_s is {tier.list_s:g}, but must be between 0 and 86400")
        if not self.hosts.transports:
            found.append("hosts.transports is empty: no KV could go from host to host; name shm, tcp or both")
        if any(not key for key in self.http.api_keys):
            found.append("http.api_keys holds an empty key, which every client would match; remove it")
        return found

    def lacks(self) -> list[str]:
        """What is asked for and needs what is not there. Of the whole: a file alone may leave it to arguments."""
        if self.kv.preemption == "swap" and not self.tiers and not self.hosts.expected:  # hosts may bring tiers
            return ["kv.preemption is 'swap', but there are 0 tiers to read from: add --tier URL, or take 'recompute'"]
        return []

    def _ranges(self) -> list[tuple[str, float, float, float]]:
        return [
            ("topology.prefill", self.topology.prefill, 0, 256),
            ("topology.decode", self.topology.decode, 0, 256),
            ("topology.mixed", self.topology.mixed, 0, 256),
            ("parallel.tensor", self.parallel.tensor, 1, 64),
            ("parallel.pipeline", self.parallel.pipeline, 1, 64),
            ("threads", self.threads, 0, 1024),
            ("log_bytes_max", self.log_bytes_max, 0, 2**50),
            ("context_tokens", self.context_tokens, 0, 2**31),
            ("kv.block_tokens", self.kv.block_tokens, 1, 1024),
            ("kv.bytes", self.kv.bytes, 0, 2**50),
            ("kv.blocks", self.kv.blocks, 0, 2**31),
            ("batch.step_tokens_max", self.batch.step_tokens_max, 1, 2**20),
            ("batch.requests_max", self.batch.requests_max, 1, 2**16),
            ("speculation.tokens_max", self.speculation.tokens_max, 0, 64),
            ("speculation.requests_max", self.speculation.requests_max, 1, 2**16),
            ("speculation.ngram_min", self.speculation.ngram_min, 1, 16),
            ("speculation.ngram_max", self.speculation.ngram_max, self.speculation.ngram_min, 16),
            ("batch.growth_tokens", self.batch.growth_tokens, 1, 2**20),
            ("tick_s", self.tick_s, 0.01, 86400),
            ("http.port", self.http.port, 0, 65535),
            ("http.body_bytes_max", self.http.body_bytes_max, 1024, 2**31),
            ("http.choices_max", self.http.choices_max, 1, 4096),
            ("survival.attempts_max", self.survival.attempts_max, 1, 100),
            ("survival.restarts_max", self.survival.restarts_max, 0, 1000),
            ("survival.restart_window_s", self.survival.restart_window_s, 1, 86400),
            ("survival.silent_s", self.survival.silent_s, 1, 86400),
            ("survival.wait_s", self.survival.wait_s, 0.1, 86400),
            ("survival.drain_s", self.survival.drain_s, 0, 86400),
            ("survival.start_s", self.survival.start_s, 1, 86400),
            ("hosts.expected", self.hosts.expected, 0, 4096),
            ("hosts.port", self.hosts.port, 0, 65535),
            ("hosts.silent_s", self.hosts.silent_s, 0.1, 86400),
            ("hosts.copy_s", self.hosts.copy_s, 0.01, 86400),
            ("hosts.mover_silent_s", self.hosts.mover_silent_s, 0.1, 86400),
        ]
