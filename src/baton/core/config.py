"""The configuration tree of `baton serve`: read from a TOML file and flags, immutable, and validated before start."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct, structs

from baton.core.class_config import ClassConfig, RouteConfig, class_problems, late_targets
from baton.core.engine_config import EnginesConfig
from baton.core.errors import ConfigError
from baton.core.http_config import BatchesConfig, HttpConfig, Port, is_loopback
from baton.core.kv_config import Bytes, KVConfig, TierConfig
from baton.core.launching import LauncherConfig
from baton.core.limits import LimitsConfig
from baton.core.served_model import ServedModelConfig
from baton.core.types import Role
from baton.core.validation import Range, did_you_mean, out_of_range, type_problems, valid_part

WORKERS_MAX = 256
"""Maximum worker processes of one role on this host."""
Timeout = Annotated[float, Range(least=1, most=86400)]
ShortTimeout = Annotated[float, Range(least=0.1, most=86400)]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
DEVICE = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?")
LoadFormat = Literal["auto", "dummy"]
AttentionName = Literal["auto", "reference", "native", "sdpa", "triton", "persistent", "fused", "flex", "jagged"]
WeightsChoice = Literal["dense", "stored", "int8", "fp8"]


class BatchLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one step."""

    step_tokens_max: Annotated[int, Range(least=1, most=2**20)] = 512
    """Maximum tokens per step. Larger values compute prompts faster; smaller ones keep ITL steady on mixed workers."""
    requests_max: Annotated[int, Range(least=1, most=2**16)] = 64
    """Maximum number of requests that a worker runs at once."""
    growth_tokens: Annotated[int, Range(least=1, most=2**20)] = 64
    """KV tokens that a decoding request reserves at a time."""


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding by prompt lookup: drafts come from the request's own text. Output text does not change."""

    tokens_max: Annotated[int, Range(least=0, most=64)] | None = None
    """Maximum drafted tokens per request and step. Empty: 8 in the native engine, else 0."""
    ngram_min: Annotated[int, Range(least=1, most=16)] = 2
    """Fewest newest tokens to search for."""
    ngram_max: Annotated[int, Range(least=1, most=16)] = 4
    """Most of them; longer runs are tried first."""
    requests_max: Annotated[int, Range(least=1, most=2**16)] = 8
    """No drafts in steps with more decoding requests than this."""
    with_slo: bool = False
    """Also draft beside requests with an SLO."""


class PhaseConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Precision of the workers that start in this role; they keep it when their role changes."""

    dtype: DtypeChoice | None = None
    """Empty: as for all workers."""
    weights: WeightsChoice | None = None
    """Empty: as for all workers."""


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of worker processes of each role. All zero means 1 prefill + 1 decode."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    def counts(self) -> dict[Role, int]:
        """Return the number of workers by role."""
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallelism inside one worker. The same for all workers of a host, since it determines the KV layout."""

    tensor: Annotated[int, Range(least=1, most=64)] = 1
    """Tensor-parallel ranks: they share the heads and the width of every layer."""
    pipeline: Annotated[int, Range(least=1, most=64)] = 1
    """Pipeline stages: they share the layers."""
    context: Annotated[int, Range(least=1, most=64)] = 1
    """Tensor ranks that divide the tokens of a KV head in each block, instead of each holding all."""
    data: Annotated[int, Range(least=1, most=64)] = 1
    """Ranks that each have the whole attention, and compute requests of their own. They share experts."""
    experts: bool = False
    """Expert parallelism: each rank holds some experts whole, not a part of the width of all."""
    overlap_tokens_min: Annotated[int, Range(least=0, most=1_000_000)] = 0
    """Tokens of a step from which it runs as two micro-batches. 0: never."""


class Plugin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A built-in policy or a user's class, with its options."""

    use: str
    """Name of a built-in policy, or `module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the constructor."""


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy per family. If several families name one class with the same options, they share one object."""

    name: str = ""
    """Name of the set that the policies come from, for display."""
    admission: Plugin = Plugin(use="slo-headroom")
    routing: Plugin = Plugin(use="slo-headroom")
    placement: Plugin = Plugin(use="slo-headroom")
    fairness: Plugin = Plugin(use="slo-order")
    batching: Plugin = Plugin(use="slo-chunked")
    eviction: Plugin = Plugin(use="lru")
    roles: Plugin = Plugin(use="demand-roles")
    scaling: Plugin = Plugin(use="fixed-fleet")
    moves: Plugin = Plugin(use="no-moves")
    lengths: Plugin = Plugin(use="recent-mean")
    streaming: Plugin = Plugin(use="while-computing")
    handoff: Plugin = Plugin(use="cheapest-handoff")
    first_token: Plugin = Plugin(use="first-token-by-prefill")


class PolicyChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policies by family: a built-in policy or `module:Class`, else that of the set `name` (docs/policies.md)."""

    name: str = ""
    """A set of policies, as for `baton sim --policy` (docs/policies.md). Empty: the
    defaults."""
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
    """Plug-ins that process requests before, and outputs after, the model. They run in order."""

    request: tuple[Plugin, ...] = ()
    output: tuple[Plugin, ...] = ()


class SloConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency targets of requests without their own. Requests likely enough to miss theirs are rejected (503)."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class SurvivalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts and limits for failed and unresponsive workers."""

    attempts_max: Annotated[int, Range(least=1, most=100)] = 3
    """Maximum attempts of a request whose workers die. The last failure is reported to the client."""
    retries_per_minute: Annotated[int, Range(least=0, most=10**6)] = 1024
    """Requests that may be tried again in a minute after the loss of workers or hosts. The rest get 503."""
    retry_ratio: Annotated[float, Range(least=0, most=1)] = 0.2
    """Retries that an admitted request gives back to this budget."""
    restarts_max: Annotated[int, Range(least=0, most=1000)] = 5
    """Restarts of one worker within `restart_window_s` before the server stops restarting it."""
    restart_window_s: Timeout = 60.0
    silent_s: Timeout = 60.0
    """A worker that sends nothing for this long (between two steps) is killed; its requests continue elsewhere."""
    start_s: Timeout = 300.0
    """Deadline for a worker to load its model."""
    wait_s: ShortTimeout = 60.0
    """Deadline of an accepted request while no worker is available. Then its client gets 503 with the reason. While a
    worker starts or a host joins, the deadline is `start_s` later."""
    drain_s: Annotated[float, Range(least=0, most=86400)] = 10.0
    """Grace period for running requests after SIGTERM or Ctrl-C. A second signal ends them at once."""
    resume_folder: str = ""
    """Folder where a stopping server saves unfinished streams, for clients to resume, and tables of the KV that joined
    hosts keep meanwhile. Empty: none is saved."""
    resume_s: Timeout = 600.0
    """How long a saved stream can be resumed, and a table be used."""
    resume_bytes_max: Bytes = 64 * 1024 * 1024
    """Maximum size of all saved streams together."""


class SandboxConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes that run grammars and chat templates."""

    cpu_s: Annotated[float, Range(least=0.05, most=3600)] = 2.0
    """Maximum CPU time to compile a grammar, compute one token mask, or render a conversation."""
    wall_s: Annotated[float, Range(least=0.1, most=3600)] = 10.0
    """Maximum wall time of the same work."""
    memory_bytes: Annotated[int, Range(least=2**24, most=2**40)] = 512 * 1024 * 1024
    """Maximum memory of one sandbox, without libraries and vocabulary."""
    processes: Annotated[int, Range(least=1, most=256)] = 2
    """Sandboxes for grammars, for chat templates, and for the token masks of each worker."""
    waiting_max: Annotated[int, Range(least=1, most=2**16)] = 64
    """Maximum grammars that wait for a sandbox. One client may have a quarter of them."""


class HostsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other hosts that serve under this server: `baton host --join URL`."""

    expected: Annotated[int, Range(least=0, most=4096)] = 0
    """Number of hosts that must join before the server is ready. Above 0, `topology` may be empty: no local worker."""
    port: Port = 0
    """Port for joining hosts, at the address of HTTP. 0: any free port."""
    listen: str = ""
    """Address at which this server's own host offers KV blocks to others. Empty: the address of HTTP."""
    transports: tuple[Literal["shm", "tcp", "nixl"], ...] = ("shm", "tcp")
    """Transports for KV between hosts, in order of preference. `shm` works between hosts on one machine; `nixl` needs
    the extra `nixl` on every host."""
    encrypt_kv: bool = True
    """Encrypt KV between hosts with TLS, by a secret that the server gives them. `false` needs `http.insecure` beyond
    loopback. `nixl` cannot encrypt."""
    advertise: str = ""
    """Address at which other hosts reach this one. Empty: the address at which the first host reached the server."""
    silent_s: ShortTimeout = 10.0
    """A host that sends nothing for this long is removed, with its KV; its requests continue elsewhere."""
    copy_s: Annotated[float, Range(least=0.01, most=86400)] = 30.0
    """Deadline for copying a request's KV between two hosts. Missing blocks are recomputed."""
    lossy: bool = False
    """Allow hosts with different KV precisions. `timings.kv_loss` of a request reports the rounding. Later requests
    that hit such blocks read rounded values."""
    handover_bytes: Bytes = 256 * 1024 * 1024
    """Maximum size of the prefixes that a leaving host hands over, that a joining one gets, and that every other
    host that computes prompts gets after 4 uses."""
    mover_silent_s: ShortTimeout = 5.0
    """A mover process that sends nothing for this long is killed and restarted."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of `baton serve`."""

    model: str = "smollm2-135m"
    served_name: str = ""
    """Name of the model in the API. Empty: the name of the model or of its file."""
    served_aliases: tuple[str, ...] = ()
    """Further names of the model, or of the first of several."""
    adapter: str = ""
    """Folder of a LoRA adapter (PEFT) to add to the weights. Without `served_name`, its name is that of the model."""
    load_format: LoadFormat = "auto"
    """Source of the weights. `auto`: the model's files. `dummy`: random weights for a folder with only config.json."""
    dtype: DtypeChoice = "auto"
    """Precision that the model computes in. `auto` is float32 on a CPU, bfloat16 on a GPU."""
    weights: WeightsChoice = "dense"
    """Format of the weights in memory. `dense`: converted to `dtype`. `stored`: 4 and 8 bits as in a GGUF file, other
    formats rounded to 8 bits. `int8`, and `fp8` (e4m3) by PyTorch: a scale per row. `stored` and `int8` need the native
    engine. `auto` for `dtype` means bfloat16, except with `dense`."""
    attention_backend: AttentionName = "auto"
    """Implementation of attention. `auto`: `native`, else `triton` on a GPU and `sdpa` on a CPU. `persistent`: `triton`
    with one decode launch per layer. `fused`: with one for prompts and decodes."""
    device: str = "auto"
    """Device of the model: `cpu`, `cuda` or `cuda:N`. `auto`: the first GPU that PyTorch can use, else the CPU."""
    models: tuple[ServedModelConfig, ...] = ()
    """Empty: `model` is the only one."""
    cores: Annotated[int, Range(least=0, most=4096)] = 0
    """Cores for the workers. 0: all."""
    threads: Annotated[int, Range(least=0, most=1024)] = 0
    """Threads per worker. 0 divides the cores (or a container's CPU quota) among the workers, at least one each."""
    idle_cores: Literal["lend", "keep"] = "lend"
    """Cores of a sleeping worker. `lend`: native engines of other workers on the host use them. `keep`: they idle."""
    context_tokens: Annotated[int, Range(least=0, most=2**31)] = 0
    """Maximum tokens of one request, prompt plus output. 0: the model's training context."""
    seed: int | None = None
    """Source of sampling seeds for requests without a seed. None: the operating system."""
    tick_s: Annotated[float, Range(least=0.01, most=86400)] = 1.0
    """Interval at which the policies for roles, scaling and moves run."""
    log: str = ""
    """File of the decision log, which `baton replay` reads. Empty: no log."""
    log_bytes_max: Bytes = 1_000_000_000
    """Maximum size of the file of the decision log. A full one becomes FILE.N."""
    log_kept_bytes_max: Bytes = 10_000_000_000
    """Maximum size of FILE.1 (the oldest), FILE.2 and so on together. One log ends there."""
    log_format: Literal["text", "json"] = "text"
    """Format of printed lines. `json`: an object a line; also responses and ended requests, without prompts."""
    step_log: str = ""
    """Folder for step logs, one file per worker. `fitted` cost models are made from them. Empty: no step logs."""
    topology: Topology = Topology()
    prefill: PhaseConfig = PhaseConfig()
    decode: PhaseConfig = PhaseConfig()
    parallel: ParallelConfig = ParallelConfig()
    kv: KVConfig = KVConfig()
    tiers: tuple[TierConfig, ...] = ()
    """Tiers below the arena, the fastest first."""
    batch: BatchLimits = BatchLimits()
    speculation: SpeculationConfig = SpeculationConfig()
    cost: dict[str, Any] = {}
    """Cost model of this machine: `model` and its values. Missing prices of the linear model are estimated from the
    size of the served model, at the speed of a reference machine. `kinds.NAME`: one for each kind of worker."""
    kind: str = ""
    """Kind of this host's workers in `cost.kinds`. Empty: the first one."""
    http: HttpConfig = HttpConfig()
    batches: BatchesConfig = BatchesConfig()
    limits: LimitsConfig = LimitsConfig()
    policy: PolicyChoice = PolicyChoice()
    hooks: HooksConfig = HooksConfig()
    slo: SloConfig = SloConfig()
    classes: tuple[ClassConfig, ...] = ()
    routes: tuple[RouteConfig, ...] = ()
    default_class: str = ""
    """Class of requests that no route matches. Empty: no class, which counts as priority 0."""
    survival: SurvivalConfig = SurvivalConfig()
    sandbox: SandboxConfig = SandboxConfig()
    hosts: HostsConfig = HostsConfig()
    engines: EnginesConfig = EnginesConfig()
    launcher: LauncherConfig = LauncherConfig()

    def problems(self) -> list[str]:
        """Return every problem of the configuration. Empty: the server can start."""
        found = out_of_range(self)
        found += [
            f"topology.{role} is {workers}, but must be between 0 and {WORKERS_MAX}"
            for role, workers in structs.asdict(self.topology).items()
            if not 0 <= workers <= WORKERS_MAX
        ]
        if self.speculation.ngram_max < self.speculation.ngram_min:
            found.append(
                f"speculation.ngram_max is {self.speculation.ngram_max}, but must be at least "
                f"{self.speculation.ngram_min}, as speculation.ngram_min is"
            )
        if DEVICE.fullmatch(self.device) is None:
            found.append(f"device is {self.device!r}, but must be auto, cpu, cuda or cuda:N")
        topology = Topology(mixed=1) if self.hosts.expected else self.topology  # joining hosts may bring workers
        if topology.prefill > 0 and topology.decode + topology.mixed == 0:
            found.append(f"{topology.prefill} prefill workers, but no worker can decode: add --decode N or --mixed N")
        if topology.decode > 0 and topology.prefill + topology.mixed == 0:
            found.append(f"{topology.decode} decode workers, but no worker can prefill: add --prefill N or --mixed N")
        if (self.slo.ttft_s is None) != (self.slo.tpot_s is None):
            found.append("slo needs both ttft_s and tpot_s: a request meets its SLO if it meets both")
        if any(value is not None and not value > 0 for value in (self.slo.ttft_s, self.slo.tpot_s)):
            found.append(
                f"slo.ttft_s is {self.slo.ttft_s} and slo.tpot_s {self.slo.tpot_s}, but both must be above 0 s"
            )
        for number, tier in enumerate(self.tiers):
            if not (tier.bytes_per_s > 0 and tier.latency_s >= 0):
                found.append(
                    f"tiers[{number}]: bytes_per_s is {tier.bytes_per_s:g} (must be above 0), latency_s is "
                    f"{tier.latency_s:g} (must be at least 0)"
                )
        if not self.hosts.transports:
            found.append("hosts.transports is empty, so hosts cannot exchange KV: name shm, tcp or both")
        if "nixl" in self.hosts.transports and self.hosts.encrypt_kv:
            found.append("hosts.transports has nixl, which cannot encrypt: remove it, or set hosts.encrypt_kv = false")
        found += self.http.problems() + self.engines.problems() + self.launcher.problems()
        found += class_problems(self.classes, self.routes, self.default_class)
        return found + self.kind_problems()

    def kind_problems(self) -> list[str]:
        """Return an error if the kind of the workers has no cost model."""
        kinds: list[str] = list(self.cost.get("kinds") or ())
        if self.prefill != PhaseConfig() or self.decode != PhaseConfig():
            role = "with [prefill] or [decode], the kind of a worker is its role"
            unnamed = [name for name in ("prefill", "decode") if kinds and name not in kinds]
            found = [f"kind is {self.kind!r}, but {role}: leave out kind"] if self.kind else []
            return found + [f"cost.kinds lacks {name!r}; {role}" for name in unnamed]
        if not self.kind or self.kind in kinds:
            return []
        known = f"known: {', '.join(kinds)}" if kinds else "add a section [cost.kinds.NAME] for each kind"
        return [f"kind is {self.kind!r}, which cost.kinds does not have{did_you_mean(self.kind, kinds)}; {known}"]

    def lacks(self) -> list[str]:
        """Return an error for each setting that needs another one. Call it after flags are merged in."""
        own = [self.topology != Topology(), self.hosts.expected > 0, bool(self.tiers)]
        if self.engines.is_used and any(own):
            return ["engines lists all workers: leave out --prefill, --decode, --mixed, --hosts and --tier"]
        if self.engines.start != "baton" and (self.engines.is_used or self.hosts.expected or self.tiers):
            return [f"--engine {self.engines.start} starts all workers: leave out other engines, --hosts and --tier"]
        if self.launcher.use == "ray" and len(self.models) > 1:
            return [f"launcher.use is 'ray', whose hosts serve one model, but there are {len(self.models)}: name one"]
        if self.kv.preemption == "swap" and not self.tiers and not self.hosts.expected:  # joining hosts may bring tiers
            return ["kv.preemption is 'swap', but there are 0 tiers to read from: add --tier URL, or take 'recompute'"]
        found = self.http.missing_keys()
        offers_at = self.hosts.listen or self.http.host
        if not (self.hosts.encrypt_kv or self.http.insecure or is_loopback(offers_at)):
            found.append(
                f"hosts.encrypt_kv is false, so {offers_at} sends KV in plain text: remove it, or add --insecure"
            )
        return found + late_targets(self.classes, self.slo.ttft_s, self.limits.queue_s)


def load(text: str) -> Config:
    """Decode and validate the text of a TOML file. Raise ConfigError with every problem, one per line."""
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a TOML file: {error}") from error
    problems = type_problems(raw, Config)
    config = msgspec.convert(valid_part(raw, Config), Config)
    problems += config.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    return config
