"""Every metric that Baton exposes, as data. `docs/api.md` is generated from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from baton.core.messages import Outcome, RejectReason
from baton.core.types import ROLES, FinishReason


@dataclass(frozen=True, slots=True)
class Label:
    """A dimension of a metric."""

    name: str
    values: tuple[str, ...] = ()
    """All possible values. Empty: names of a deployment, such as workers and hosts."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A value that only grows. If all label values are known, every combination is exposed from the start, at 0."""

    name: str
    unit: str
    help: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that goes up and down, set from views of the cluster."""

    name: str
    unit: str
    help: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution, counted in buckets."""

    name: str
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, in the metric's unit. A last bucket without a bound is added."""


Metric = Counter | Gauge | Histogram

ROLE = Label("role", ROLES)
OUTCOME = Label("outcome", get_args(Outcome))
REASON = Label("reason", get_args(RejectReason))
FINISH_REASON = Label("reason", get_args(FinishReason))
REFUSAL_STATUS = Label("status", ("408", "413", "429", "431", "503"))
REFUSAL_CODE = Label("reason")
CLASS = Label("class")
TENANT = Label("tenant")
TOKEN_KIND = Label("kind", ("prompt", "cached", "output"))
MODEL = Label("model")
"""Of every metric but `EDGE_METRICS`, if the server has several models."""
WORKER = Label("worker")
HOST = Label("host")
TIER = Label("tier")
TIER_OUTCOME = Label("outcome", ("stored", "refused", "loaded", "missed", "damaged"))
LATENCY = Label("latency", ("ttft", "tpot"))
COPY_PHASE = Label("during", ("prefill", "handoff"))
ARENA_TIER = "host"
"""Value of the label `tier` for the arena of a host."""
KV_STATE = Label("state", ("free", "used", "cached"))

REQUEST_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5,
)  # fmt: skip
STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
RATIO_BUCKETS = (0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
HANDOFF_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

TTFT = Histogram(
    "baton_time_to_first_token_seconds", "s",
    "Arrival at the server to the first token on the client's socket.", buckets=REQUEST_BUCKETS_S,
)  # fmt: skip
ITL = Histogram(
    "baton_inter_token_latency_seconds", "s",
    "Each gap between two output tokens of a request.", buckets=TOKEN_BUCKETS_S,
)  # fmt: skip
TPOT = Histogram(
    "baton_time_per_output_token_seconds", "s",
    "First to last token of a request, divided by (output tokens - 1).", buckets=TOKEN_BUCKETS_S,
)  # fmt: skip
E2E = Histogram(
    "baton_e2e_request_latency_seconds", "s",
    "Arrival at the server to the last token on the client's socket.", buckets=REQUEST_BUCKETS_S,
)  # fmt: skip
QUEUE = Histogram(
    "baton_request_queue_seconds", "s",
    "Arrival to the first step with a part of the prompt.", buckets=REQUEST_BUCKETS_S,
)  # fmt: skip
PREFILL = Histogram(
    "baton_request_prefill_seconds", "s",
    "First step with a part of the prompt to the first token from that worker.",
    buckets=REQUEST_BUCKETS_S,
)  # fmt: skip
HANDOFF = Histogram(
    "baton_handoff_seconds", "s",
    "First token of the prefill worker until a decode worker has the request in its batch.",
    buckets=HANDOFF_BUCKETS_S,
)  # fmt: skip
DECODE_QUEUE = Histogram(
    "baton_decode_queue_seconds", "s",
    "KV on the decode worker's host to the first step there.",
    buckets=HANDOFF_BUCKETS_S,
)  # fmt: skip
HANDOFF_COPY = Counter(
    "baton_handoff_copy_seconds_total", "s",
    "Copying time between hosts, during prefill (it delays nothing) and after it.",
    labels=(COPY_PHASE,),
)  # fmt: skip
HANDOFF_BYTES = Counter(
    "baton_handoff_bytes_total", "bytes",
    "KV bytes copied by handoffs. Stays 0 on one host, where decode adopts the blocks.",
)  # fmt: skip
HANDOFF_LAYER_BYTES = Counter(
    "baton_handoff_layer_bytes_total", "bytes",
    "KV bytes of handoffs that were copied layer by layer during prefill.",
)  # fmt: skip
REQUESTS = Counter("baton_requests_total", "requests", "Closed requests.", labels=(OUTCOME,))
REJECTED = Counter("baton_requests_rejected_total", "requests", "Requests that were refused.", labels=(REASON,))
HTTP_REFUSALS = Counter(
    "baton_http_refusals_total", "requests",
    "Responses with these statuses, cluster rejections included. `reason` is the error's `code`.",
    labels=(REFUSAL_STATUS, REFUSAL_CODE),
)  # fmt: skip
CLASS_REQUESTS = Counter(
    "baton_class_requests_total", "requests", "Closed requests by service class.", labels=(CLASS, OUTCOME)
)
CLASS_TOKENS = Counter(
    "baton_class_tokens_total", "tokens", "Tokens by class. `cached` is part of `prompt`.",
    labels=(CLASS, TOKEN_KIND),
)  # fmt: skip
TENANT_REQUESTS = Counter(
    "baton_tenant_requests_total", "requests",
    "Closed requests by tenant (at most 64, then `other`), for the scope `admin`.",
    labels=(TENANT, OUTCOME),
)  # fmt: skip
TENANT_TOKENS = Counter(
    "baton_tenant_tokens_total", "tokens", "Tokens by tenant, for the scope `admin`.",
    labels=(TENANT, TOKEN_KIND),
)  # fmt: skip
CLASS_TTFT = Histogram(
    "baton_class_time_to_first_token_seconds", "s", "As baton_time_to_first_token_seconds, by service class.",
    labels=(CLASS,), buckets=REQUEST_BUCKETS_S,
)  # fmt: skip
IN_SLO = Counter(
    "baton_requests_in_slo_total", "requests", "Finished requests that met both their TTFT and their TPOT target."
)
RUNNING = Gauge("baton_requests_running", "requests", "Requests in the worker's batch.", labels=(WORKER, ROLE))
WAITING = Gauge(
    "baton_requests_waiting",
    "requests",
    "Requests that wait on the worker.",
    labels=(WORKER, ROLE),
)
KV_USAGE = Gauge(
    "baton_kv_usage_ratio", "ratio", "Used share of a host's KV blocks.",
    labels=(HOST,),
)  # fmt: skip
KV_BLOCKS = Gauge(
    "baton_kv_blocks", "blocks",
    "KV blocks; free + used + cached is the tier's size. A shared store is shown at one host.",
    labels=(HOST, TIER, KV_STATE),
)  # fmt: skip
TIER_BLOCKS = Counter(
    "baton_tier_blocks_total", "blocks",
    "Blocks that a tier stored or refused, loaded or missed. `damaged`: missed for a wrong checksum.",
    labels=(HOST, TIER, TIER_OUTCOME),
)  # fmt: skip
TIER_RESTS = Counter(
    "baton_tier_rests_total", "times",
    "Pauses of a tier whose store failed, hung or could not be opened.",
    labels=(HOST, TIER),
)  # fmt: skip
READ_BACK_BLOCKS = Counter(
    "baton_read_back_blocks_total", "blocks",
    "Blocks of preempted requests that were read from a tier instead of being recomputed.", labels=(HOST, TIER),
)  # fmt: skip
GENERATED_TOKENS = Counter(
    "baton_generation_tokens_total", "tokens", "Output tokens whose text reached a client's socket."
)
PROMPTS = Counter(
    "baton_prompts_total", "prompts", "Prompts by the kind of the worker that began to compute them (`cost.kinds`).",
    labels=(Label("kind"),),
)  # fmt: skip
PREFIX_QUERY_TOKENS = Counter(
    "baton_prefix_query_tokens_total", "tokens", "Prompt tokens of requests that were started."
)
PREFIX_HIT_TOKENS = Counter("baton_prefix_hit_tokens_total", "tokens", "Prompt tokens whose KV was cached.")
PREEMPTIONS = Counter(
    "baton_preemptions_total", "requests",
    "Preemptions: the request gave up its KV blocks and queued again.",
)  # fmt: skip
FAILOVERS = Counter(
    "baton_failovers_total", "requests", "Requests that continued on another worker after theirs was lost."
)
FAILOVER_TOKENS = Counter(
    "baton_failover_tokens_total", "tokens",
    "Tokens of requests that continued after a loss: their KV was read or recomputed.",
    labels=(Label("kv", ("read", "recomputed")),),
)  # fmt: skip
RESUMED = Counter(
    "baton_resumed_streams_total", "streams",
    "Streams saved at the server's end, resumed after its restart, or refused.",
    labels=(Label("outcome", ("saved", "resumed", "refused")),),
)  # fmt: skip
LIVE_MOVES = Counter("baton_live_moves_total", "moves", "Requests stopped on a live worker and continued.")
ROLE_FLIPS = Counter("baton_role_flips_total", "flips", "Changes of a worker's role.")
UNLOGGED_DECISIONS = Counter(
    "baton_unlogged_decisions_total", "decisions", "Decisions that were not written, because the log had ended.",
)  # fmt: skip
FINISH_REASONS = Counter(
    "baton_finish_reasons_total", "requests", "Finished requests. `length`: their output limit was reached.",
    labels=(FINISH_REASON,),
)  # fmt: skip
STEP = Histogram("baton_step_seconds", "s", "One forward pass.", labels=(ROLE,), buckets=STEP_BUCKETS_S)
PREDICTION_ERROR = Histogram(
    "baton_prediction_error_ratio", "",
    "Actual over predicted latency of a request. TPOT is predicted for requests with an SLO.",
    labels=(LATENCY,), buckets=RATIO_BUCKETS,
)  # fmt: skip
STEP_ERROR = Gauge(
    "baton_step_error_ratio", "", "Typical relative error of the prediction of a worker's next step.",
    labels=(WORKER, ROLE),
)  # fmt: skip
SPECULATION_DRAFTED_TOKENS = Counter(
    "baton_speculation_drafted_tokens_total", "tokens", "Drafted tokens that were verified."
)
SPECULATION_ACCEPTED_TOKENS = Counter(
    "baton_speculation_accepted_tokens_total", "tokens", "Drafted tokens that were accepted."
)

METRICS: tuple[Metric, ...] = (
    TTFT, ITL, TPOT, E2E, QUEUE, PREFILL, HANDOFF, HANDOFF_BYTES, REQUESTS, REJECTED, IN_SLO, RUNNING, WAITING,
    KV_BLOCKS, PREFIX_QUERY_TOKENS, PREFIX_HIT_TOKENS, PREEMPTIONS, FAILOVERS, ROLE_FLIPS, STEP,
    SPECULATION_DRAFTED_TOKENS, SPECULATION_ACCEPTED_TOKENS, TIER_BLOCKS, TIER_RESTS, HANDOFF_LAYER_BYTES,
    LIVE_MOVES, READ_BACK_BLOCKS, HTTP_REFUSALS, PREDICTION_ERROR, STEP_ERROR, CLASS_REQUESTS, CLASS_TTFT,
    GENERATED_TOKENS, RESUMED, UNLOGGED_DECISIONS, FINISH_REASONS, FAILOVER_TOKENS, DECODE_QUEUE, HANDOFF_COPY,
    CLASS_TOKENS, TENANT_REQUESTS, TENANT_TOKENS, KV_USAGE, PROMPTS,
)  # fmt: skip
EDGE_METRICS: tuple[Metric, ...] = (HTTP_REFUSALS, RESUMED)
"""Metrics of the HTTP edge, which all models of a server share."""
