"""Every metric that Baton exposes, as data. `docs/api.md` is generated from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from baton.core.messages import Outcome, RejectReason
from baton.core.types import ROLES


@dataclass(frozen=True, slots=True)
class Label:
    """A dimension of a metric."""

    name: str
    values: tuple[str, ...] = ()
    """All possible values. Empty: names of a deployment, such as workers and hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A value that only grows. If all label values are known, every combination is exposed from the start, at 0."""

    name: str
    help: str
    unit: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A value that goes up and down, set from views of the cluster."""

    name: str
    help: str
    unit: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A distribution, counted in buckets."""

    name: str
    help: str
    unit: str
    buckets: tuple[float, ...]
    """Upper bounds, ascending, in the metric's unit. A last bucket without a bound is added."""
    labels: tuple[Label, ...] = ()


Metric = Counter | Gauge | Histogram

ROLE = Label("role", ROLES)
OUTCOME = Label("outcome", get_args(Outcome))
REASON = Label("reason", get_args(RejectReason))
WORKER = Label("worker")
HOST = Label("host")
TIER = Label("tier")
TIER_OUTCOME = Label("outcome", ("stored", "refused", "loaded", "missed", "damaged"))
KV_STATE = Label("state", ("free", "used", "cached"))

REQUEST_BUCKETS_S = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TOKEN_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    5,
)
STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
HANDOFF_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

TTFT = Histogram(
    name="baton_time_to_first_token_seconds",
    help="Arrival at the server to the first token on the client's socket.",
    unit="s",
    buckets=REQUEST_BUCKETS_S,
)
ITL = Histogram(
    name="baton_inter_token_latency_seconds",
    help="Each gap between two output tokens of a request.",
    unit="s",
    buckets=TOKEN_BUCKETS_S,
)
TPOT = Histogram(
    name="baton_time_per_output_token_seconds",
    help="Of a request: first to last token, over its output tokens less one.",
    unit="s",
    buckets=TOKEN_BUCKETS_S,
)
E2E = Histogram(
    name="baton_e2e_request_latency_seconds",
    help="Arrival at the server to the last token on the client's socket.",
    unit="s",
    buckets=REQUEST_BUCKETS_S,
)
QUEUE = Histogram(
    name="baton_request_queue_seconds",
    help="Arrival to the first slice of the request in a step of its first worker.",
    unit="s",
    buckets=REQUEST_BUCKETS_S,
)
PREFILL = Histogram(
    name="baton_request_prefill_seconds",
    help="First slice in a step to the first token leaving the first worker.",
    unit="s",
    buckets=REQUEST_BUCKETS_S,
)
HANDOFF = Histogram(
    name="baton_handoff_seconds",
    help="First token leaving the prefill worker to the request standing in a batch of its decode worker.",
    unit="s",
    buckets=HANDOFF_BUCKETS_S,
)
HANDOFF_BYTES = Counter(
    name="baton_handoff_bytes_total",
    help="KV bytes copied by handoffs. Stays 0 on one host, where decode adopts the blocks.",
    unit="bytes",
)
HANDOFF_LAYER_BYTES = Counter(
    name="baton_handoff_layer_bytes_total",
    help="Of the KV bytes copied by handoffs, those that went over by layer, while later layers were computed.",
    unit="bytes",
)
REQUESTS = Counter(
    name="baton_requests_total",
    help="Closed requests.",
    unit="requests",
    labels=(OUTCOME,),
)
REJECTED = Counter(
    name="baton_requests_rejected_total",
    help="Requests that were refused.",
    unit="requests",
    labels=(REASON,),
)
IN_SLO = Counter(
    name="baton_requests_in_slo_total",
    help="Finished requests that met both their TTFT and their TPOT target.",
    unit="requests",
)
RUNNING = Gauge(
    name="baton_requests_running",
    help="Requests in the worker's batch.",
    unit="requests",
    labels=(WORKER, ROLE),
)
WAITING = Gauge(
    name="baton_requests_waiting",
    help="Requests that the worker was given and has not begun.",
    unit="requests",
    labels=(WORKER, ROLE),
)
KV_BLOCKS = Gauge(
    name="baton_kv_blocks",
    help="KV blocks. free + used + cached is the tier's size. A store that hosts share is shown at the first of them.",
    unit="blocks",
    labels=(HOST, TIER, KV_STATE),
)
TIER_BLOCKS = Counter(
    name="baton_tier_blocks_total",
    help="Blocks that a tier below the arena was given (stored, refused) or asked for (loaded, missed), and those that"
    " were found damaged when they were read: misses too.",
    unit="blocks",
    labels=(HOST, TIER, TIER_OUTCOME),
)
TIER_RESTS = Counter(
    name="baton_tier_rests_total",
    help="Times that a host left a tier's store alone for a while: it failed or hung again and again, or could not be"
    " opened when the host or its mover started.",
    unit="times",
    labels=(HOST, TIER),
)
READ_BACK_BLOCKS = Counter(
    name="baton_read_back_blocks_total",
    help="Blocks of preempted requests that were read from a tier, and so not computed again.",
    unit="blocks",
    labels=(HOST, TIER),
)
PREFIX_QUERY_TOKENS = Counter(
    name="baton_prefix_query_tokens_total",
    help="Prompt tokens of requests that were started.",
    unit="tokens",
)
PREFIX_HIT_TOKENS = Counter(
    name="baton_prefix_hit_tokens_total",
    help="Prompt tokens whose KV was already held.",
    unit="tokens",
)
PREEMPTIONS = Counter(
    name="baton_preemptions_total",
    help="Running requests that gave back their blocks and queued again.",
    unit="requests",
)
FAILOVERS = Counter(
    name="baton_failovers_total",
    help="Requests that went on elsewhere after their worker was lost.",
    unit="requests",
)
LIVE_MOVES = Counter(
    name="baton_live_moves_total",
    help="Times that a policy moved a request to another worker while it decoded.",
    unit="moves",
)
ROLE_FLIPS = Counter(
    name="baton_role_flips_total",
    help="Changes of a worker's role.",
    unit="flips",
)
STEP = Histogram(
    name="baton_step_seconds",
    help="One forward pass.",
    unit="s",
    buckets=STEP_BUCKETS_S,
    labels=(ROLE,),
)

SPECULATION_DRAFTED_TOKENS = Counter(
    name="baton_speculation_drafted_tokens_total",
    help="Tokens guessed from the request's own text, and verified.",
    unit="tokens",
)
SPECULATION_ACCEPTED_TOKENS = Counter(
    name="baton_speculation_accepted_tokens_total",
    help="Guesses that came true: tokens without a step of their own.",
    unit="tokens",
)

METRICS: tuple[Metric, ...] = (
    TTFT,
    ITL,
    TPOT,
    E2E,
    QUEUE,
    PREFILL,
    HANDOFF,
    HANDOFF_BYTES,
    REQUESTS,
    REJECTED,
    IN_SLO,
    RUNNING,
    WAITING,
    KV_BLOCKS,
    PREFIX_QUERY_TOKENS,
    PREFIX_HIT_TOKENS,
    PREEMPTIONS,
    FAILOVERS,
    ROLE_FLIPS,
    STEP,
    SPECULATION_DRAFTED_TOKENS,
    SPECULATION_ACCEPTED_TOKENS,
    TIER_BLOCKS,
    TIER_RESTS,
    HANDOFF_LAYER_BYTES,
    LIVE_MOVES,
    READ_BACK_BLOCKS,
)
