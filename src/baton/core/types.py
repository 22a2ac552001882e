"""Types that all packages share: ids, requests, sampling parameters, views of the cluster."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, NewType

from msgspec import Struct

from baton.core.report_parts import AnswerPace, OtherLoad, StepPrices

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
HostId = NewType("HostId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
TokenBytes = NewType("TokenBytes", bytes)
"""Token ids as little-endian uint32, encoded and decoded without a loop in Python."""

Role = Literal["prefill", "decode", "mixed"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
Until = Literal["prompt", "first_token", "end"]
"""How far a worker runs a request. `prompt`: all known tokens but the last, which the decode worker computes.
`first_token`: until the next token is sampled. `end`: until the request ends. The first two end with a handoff."""
FinishReason = Literal["stop", "length"]


def pack_tokens(tokens: Iterable[int]) -> TokenBytes:
    """Encode token ids for a message or a log."""
    return TokenBytes(array("I", tokens).tobytes())


def unpack_tokens(data: bytes) -> array[int]:
    """Decode token ids into an array of four bytes per token."""
    return array("I", data)


class Slo(Struct, frozen=True, kw_only=True, gc=False):
    """Latency targets of one request. A request meets its SLO if it meets both."""

    ttft_s: float
    tpot_s: float


GRAMMAR_FAILED = "the output's grammar cannot be followed"
"""The reason of a failed request starts with this if its own grammar is the cause, so that its client gets a 400."""


class Grammar(Struct, frozen=True, kw_only=True):
    """A constraint on the output. Sent as text and compiled by the worker that samples."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    """`choice`: a JSON list of texts. `grammar`: Lark or GBNF from a client. `lark`: Lark from Baton itself."""
    text: str


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters. Values are validated at the HTTP edge."""

    temperature: float = 1.0
    """0: greedy, which chooses the token with the highest logit, and the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, bias added to its logit)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not have."""
    seed: int = 0
    """Together with the position, the only source of randomness, so that a request continues identically elsewhere."""
    top_logprobs: int | None = None
    """None: no log probabilities. 0: of the sampled token only. k: also of the k most likely tokens."""
    prompt_logprobs: bool = False
    """Also return the log probability of every prompt token after the first. Such a request uses no prefix hit."""
    embedding: bool = False
    """Also return an embedding of the prompt, with the first output token."""
    stop_token_ids: tuple[int, ...] = ()
    """End of sequence (unless the client ignores it) and the client's own stop tokens."""
    output_tokens_min: int = 0
    """No stop token is sampled before this many output tokens."""
    grammar: Grammar | None = None
    """Restricts sampling to tokens that can lead to a match. None: free text."""


class ServiceClass(Struct, frozen=True, kw_only=True, gc=False):
    """The service class of a request: its priority, reservations and limits."""

    name: str
    priority: int = 0
    """Classes with lower values are served earlier."""
    step_ratio: float = 1.0
    """Share of a step's tokens that prompts of this class may fill if no prompt of a more urgent class waits."""
    urgent_ttft_s: float | None = None
    """Shortest TTFT SLO of the more urgent classes, if any: prompts of this class keep steps short for it."""
    decode_ratio: float = 0.0
    """Share of the concurrent requests of decode workers that is reserved."""
    kv_ratio: float = 0.0
    """Share of each host's KV blocks that the class may take back from less urgent classes."""
    aging_s: float = 30.0
    """Waiting time after which the class counts as one priority more urgent."""
    output_tokens_max: int = 0
    """Output limit of a request that is deferred (`defer_s`). 0: none."""
    defer_s: float = 0.0
    """A request that cannot meet its SLO waits without one for at most this long. 0: it is rejected."""
    copy_tokens: int = 0
    """Output tokens after which new KV of a decode is copied, in case that its host is lost. 0: no copies."""


OVERTAKEN_TURNS = 64
"""Number of requests that a request of the next more urgent class (priority lower by 1) may overtake on a worker."""


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """A client's request as policies see it. It has no output length, so that no policy can use the true one, and no
    tokens of the prompt: decisions need only their number and block hashes."""

    id: RequestId
    prompt_tokens: int
    block_hashes: tuple[BlockHash, ...] = ()
    """Chained hashes of the prompt's full blocks, in order."""
    prompt_hash: BlockHash = BlockHash(b"")
    """Hash of the whole prompt, chained like those of its blocks. Empty: not known."""
    output_tokens_max: int
    arrived_at_s: float
    sampling: Sampling = Sampling()
    slo: Slo | None = None
    tenant: str = ""
    """Tenant, for fair queues and quotas. Empty: anonymous."""
    client: int = 0
    """Number that identifies the client (its API key or address), for fair turns in steps. 0: not known."""
    priority: int = 0
    """Lower values are served earlier."""
    turn: int = 0
    """Position in the order of the fair queue. Workers and arenas serve lower ones first. 0: there is no fair queue."""
    service: ServiceClass | None = None
    """None: the request counts as one of priority 0."""
    cache_salt: str = ""
    """Requests share cached blocks only if their salts are equal."""
    may_wait: bool = False
    """The request has no deadline in the queue. Set for all but the first choice of an HTTP request."""
    deferred_s: float = 0.0
    """Deadline in the queue, in seconds, of a request whose SLO was dropped. 0: its SLO holds."""
    resumed_tokens: int = 0
    """Output tokens from before a restart of the server. The worker that decodes it computes them again."""
    shares_blocks: bool = True
    """False: its blocks are not hashed, so it neither uses nor leaves cached blocks."""
    hosts: tuple[HostId, ...] = ()
    """The only hosts that may serve the request. Empty: all."""
    traceparent: str = ""
    """The W3C header with which servers of other engines go on with its trace. Empty: there is none."""

    @property
    def turn_key(self) -> int:
        """Sort key on workers and in arenas, lowest first. More urgent classes overtake within a bound."""
        return self.turn + OVERTAKEN_TURNS * (self.service.priority if self.service is not None else 0)


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log probability (natural) of one token, and of the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class OutputToken(Struct, frozen=True, array_like=True, gc=False):
    """One generated token, sent from a worker to the client's stream."""

    request_id: RequestId
    attempt: int
    index: int
    """0 for the first output token. Reveals duplicate and lost tokens."""
    token: int
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """With the first token, if requested: one entry per prompt token but the first."""
    embedding: bytes = b""
    """With the first token, if requested: a unit vector of little-endian float32 values."""


class WorkerView(Struct, frozen=True, kw_only=True, gc=False):
    """A worker's load at its last report, at `observed_at_s`."""

    id: WorkerId
    host: HostId
    role: Role
    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens that the worker has accepted and not computed."""
    queued_requests: int = 0
    """Number of requests with such tokens."""
    queued_pairs: float = 0.0
    """Their (query, key) pairs of attention, as `StepShape.prefill_pairs`. 0: unknown."""
    context_tokens: int = 0
    """Tokens of all running requests: the context of a decode step."""
    observed_at_s: float = 0.0
    newest_request: RequestId | None = None
    """The last request that the worker had received at this report. Later requests are not counted in it."""
    kind: str = ""
    """Hardware and engine profile, as used by `CostModel.on`. Empty: all workers are alike."""
    kv_tokens_max: int = 0
    """Size of its host's arena in KV tokens. 0: unknown."""
    step_tokens_max: int = 0
    """Maximum tokens per step. 0: unknown."""
    requests_max: int = 0
    """Maximum requests per step. 0: unknown."""
    prices: StepPrices | None = None
    """Learned from the steps of this worker. None: every step took as long as the cost model says."""
    pace: AnswerPace | None = None
    """Of its answers that have an SLO. None: it has none, or is not known."""
    others: OtherLoad | None = None
    """In a report: load besides the requests of this cluster. The coordinator adds it to the counts above."""


class StepShape(Struct, frozen=True, kw_only=True, gc=False):
    """The sums that determine the duration of a step."""

    prefill_tokens: int = 0
    """Prompt tokens in the step."""
    prefill_chunks: int = 0
    """Number of requests with prompt tokens."""
    prefill_pairs: float = 0.0
    """(query, key) pairs of attention over prompts: n * c + n * (n + 1) / 2 for n tokens after c cached ones."""
    decode_requests: int = 0
    """Number of requests that decode."""
    context_tokens: int = 0
    """Tokens whose KV the decodes read, including the new ones."""
    spilled_tokens: int = 0
    """Tokens whose KV is read from the spill space. Cost models ignore them; `SpillRules.step_s` adds the time."""


def prefill_pairs(new_tokens: int, cached_tokens: int) -> float:
    """Return the number of (query, key) pairs of a chunk, for `StepShape.prefill_pairs`."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2


def prompt_step(new_tokens: int, cached_tokens: int) -> StepShape:
    """Return the shape of a step that computes one prompt, in one chunk after its cached tokens."""
    pairs = prefill_pairs(new_tokens, cached_tokens)
    return StepShape(prefill_tokens=new_tokens, prefill_chunks=1, prefill_pairs=pairs)


class HostView(Struct, frozen=True, kw_only=True):
    """One host's KV blocks. free + used + cached = total, always."""

    id: HostId
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int


class TierHit(Struct, frozen=True, array_like=True):
    """A prefix that a host can make available by reading from its tiers."""

    tokens: int
    """Leading prompt tokens, including those in the arena."""
    load_s: float
    """Predicted time until they are in the arena, after the reads that are queued already."""


class Prediction(Struct, frozen=True, array_like=True, gc=False):
    """The predicted latencies of a request, when its prompt is assigned to a worker."""

    ttft_s: float
    tpot_s: float = 0.0
    """0: not predicted, as for a request without an SLO."""


class ErrorBar(Struct, frozen=True, array_like=True, gc=False):
    """The error of recent predictions of one latency, as logarithms of actual / predicted."""

    bias_log: float = 0.0
    """Mean. Above 0: requests took longer than predicted."""
    spread_log: float = 0.0
    """Standard deviation."""
    requests: float = 0.0
    """Number of requests that the error bar rests on. Old ones count less."""
    margin_log: float = 0.0
    """How far predictions have to stay below the SLO, so that nearly all admitted requests meet it."""


class PredictionErrors(Struct, frozen=True, array_like=True, gc=False):
    """The errors of recent predictions."""

    ttft: ErrorBar = ErrorBar()
    tpot: ErrorBar = ErrorBar()


class FlightView(Struct, frozen=True, kw_only=True):
    """A request on a worker, as the coordinator knows it."""

    request: Request
    worker: WorkerId
    started_at_s: float
    """When the request was sent to that worker."""


class LoadWindow(Struct, frozen=True, kw_only=True):
    """Load of the cluster between two ticks: the input of roles, scaling and forecasts."""

    end_s: float
    window_s: float
    arrived_requests: int = 0
    arrived_tokens: int = 0
    """Prompt tokens of the requests that arrived."""
    begun_requests: int = 0
    """Number of requests whose prompt was assigned to a worker. The coordinator sets it."""
    cached_tokens: int = 0
    """Prompt tokens of the begun requests that need no computation."""
    rejected_requests: int = 0
    prefilled_requests: int = 0
    """Number of first tokens."""
    ttft_s: float = 0.0
    """Mean TTFT of those first tokens. 0 if there was none."""
    finished_requests: int = 0
    output_tokens: int = 0
    """Output tokens of the finished requests."""
    tpot_s: float = 0.0
    """Mean TPOT of finished requests with two tokens or more. 0 if there was none."""
    slo_ttft_s: float = 0.0
    """Tightest TTFT SLO of the requests that arrived. 0: none had an SLO."""
    slo_tpot_s: float = 0.0
    """Tightest TPOT SLO of the requests that arrived. 0: none had an SLO."""


class BoundLoad(Struct, frozen=True, array_like=True):
    """Requests that will decode on a worker and whose prompts are still computed elsewhere."""

    requests: int
    tokens: int
    """Tokens of their prompts."""


_PLACE = attrgetter("host", "kind")


class ClusterView(Struct, frozen=True, kw_only=True, gc=False):
    """The state of the cluster for one decision about one request."""

    workers: tuple[WorkerView, ...]
    prefix_hit_tokens: dict[HostId, int]
    """Leading prompt tokens of the request in each host's arena. A hint that may be stale."""
    expected_output_tokens: float = 0.0
    """Predicted output tokens of the request. 0: no request has finished yet."""
    waiting_requests: int = 0
    """Requests without a worker, and on workers that drain."""
    tier_hits: dict[HostId, tuple[TierHit, ...]] = {}
    """Prefixes beyond `prefix_hit_tokens` that the tiers of a host can provide, the shortest first. Hosts without any
    are left out.

    Each one ends at the boundary between two tiers, so the best amount to read is one of them, or nothing."""
    starting: dict[Role, int] = {}
    """Workers that were requested and have not joined yet."""
    step_began_s: dict[WorkerId, float] = {}
    """Earliest time at which the running step of a worker with queued prompts can have begun: its last report, or a
    later assignment to a worker without prompts. By the coordinator's clock."""
    bound: dict[WorkerId, BoundLoad] = {}
    """Requests that will decode on a worker and are not in its own view yet. Workers without any are left out."""
    first_token_by: Literal["prefill", "decode"] = "prefill"
    """The worker that samples the first token of the request if its prompt is handed off."""
    is_sent_ahead: bool = False
    """The KV of the request is streamed to its decode host while the prompt is computed."""
    errors: PredictionErrors = PredictionErrors()
    """Errors of the predictions for recent requests. Set for a request with an SLO."""

    def having(self, role: Role) -> list[WorkerView]:
        """Return the workers that can serve this role: those with the role, and mixed ones."""
        roles = (role, "mixed")
        return [worker for worker in self.workers if worker.role in roles]

    def kinds_on(self, host: HostId | None) -> set[str]:
        """Return the kinds of the workers on a host, which share its link. Empty if there is no host or worker."""
        return {kind for at, kind in set(map(_PLACE, self.workers)) if at == host}
