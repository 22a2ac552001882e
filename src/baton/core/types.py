"""Values that every package speaks: identities, requests, sampling, views of the cluster."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, NewType

from msgspec import Struct

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
HostId = NewType("HostId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
TokenBytes = NewType("TokenBytes", bytes)
"""Token ids as little-endian uint32: four bytes a token, encoded and decoded without a loop in Python."""

Role = Literal["prefill", "decode", "mixed"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
Until = Literal["prompt", "first_token", "end"]
"""How far a worker runs a request: up to its last known token, which it leaves to whoever draws the next one; to its
next token (after either the KV is handed off); or to its end."""
FinishReason = Literal["stop", "length"]


def pack_tokens(tokens: Iterable[int]) -> TokenBytes:
    """Encode token ids for a wire or a log."""
    return TokenBytes(array("I", tokens).tobytes())


def unpack_tokens(data: bytes) -> array[int]:
    """Decode what `pack_tokens` made: four bytes a token, not an object each."""
    return array("I", data)


class Slo(Struct, frozen=True, kw_only=True, gc=False):
    """Latency targets of one request. A request is in its SLO when it meets both."""

    ttft_s: float
    tpot_s: float


class Grammar(Struct, frozen=True, kw_only=True):
    """What an output has to match. It travels as text; whoever draws the tokens compiles it."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    """`choice`: a JSON list of texts. `grammar`: Lark or GBNF, as a client writes it. `lark`: our own."""
    text: str


class Sampling(Struct, frozen=True, kw_only=True):
    """How the next token is drawn. Values are checked at the HTTP edge; here they are in range."""

    temperature: float = 1.0
    """0 is greedy: the token with the highest logit, the lowest id among equals."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, bias added to its logit)."""
    seed: int = 0
    """With the position, the only source of randomness: a moved request draws what it would have drawn."""
    top_logprobs: int | None = None
    """None: no log probabilities. 0: of the chosen token only. k: of the k likeliest as well."""
    prompt_logprobs: bool = False
    """Also report the log probability of every prompt token after the first. Such a request takes no prefix hit."""
    embedding: bool = False
    """Also report what the model made of the whole prompt, as a vector. Comes with the first output token."""
    stop_token_ids: tuple[int, ...] = ()
    """End of sequence (unless the client ignores it) and the client's own stop tokens."""
    output_tokens_min: int = 0
    """No stop token is drawn before this many output tokens."""
    grammar: Grammar | None = None
    """Only tokens that can lead to a match are drawn, and the end only at one. None: free text."""


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """What a client asked for. Deliberately has no output length: nobody knows it yet.

    The prompt's tokens are not here: decisions need their number and their block hashes, workers get them beside it.
    """

    id: RequestId
    prompt_tokens: int
    block_hashes: tuple[BlockHash, ...] = ()
    """Chained hashes of the prompt's full blocks, in order."""
    output_tokens_max: int
    arrived_at_s: float
    sampling: Sampling = Sampling()
    slo: Slo | None = None
    tenant: str = ""
    """Who is asking: the client's share in fair queues. Empty: anonymous."""
    priority: int = 0
    """Lower is served earlier."""
    cache_salt: str = ""
    """Requests share cached blocks only under one salt."""
    shares_blocks: bool = True
    """False: its blocks get no names. Nobody finds them, it finds none, and nothing of it is hashed."""


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log probability of one token, and of the likeliest at its position (natural logarithm)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class OutputToken(Struct, frozen=True, array_like=True, gc=False):
    """One generated token on its way from a worker to its client."""

    request_id: RequestId
    attempt: int
    index: int
    """0 for the first output token. Makes a repeated or lost token visible."""
    token: int
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """With the first token, if asked for: one entry per prompt token but the first."""
    embedding: bytes = b""
    """With the first token, if asked for: float32 values, little-endian, of unit length. Empty: not asked for."""


class WorkerView(Struct, frozen=True, kw_only=True, gc=False):
    """A worker's load as it last reported it. May be stale: `observed_at_s` says how stale."""

    id: WorkerId
    host: HostId
    role: Role
    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens that it was given and has not computed."""
    queued_requests: int = 0
    """Requests that they belong to."""
    context_tokens: int = 0
    """Tokens of all running requests: what a decode step reads."""
    observed_at_s: float = 0.0
    newest_request: RequestId | None = None
    """What it was told to start last, as far as this report knows: all that was given to it later is not in it."""
    kind: str = ""
    """Hardware and engine profile, as `CostModel.on` knows it. Empty: all workers are alike."""
    kv_tokens_max: int = 0
    """Tokens of KV that its host's arena holds. 0: not told."""
    step_tokens_max: int = 0
    """Most tokens of one of its steps. 0: not told."""
    requests_max: int = 0
    """Most requests of one of its steps. 0: not told."""


class StepShape(Struct, frozen=True, kw_only=True, gc=False):
    """What one forward pass computes, in the sums that its duration depends on."""

    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_chunks: int = 0
    """Requests that they belong to."""
    prefill_pairs: float = 0.0
    """(query, key) pairs that attention looks at for them: n * c + n * (n + 1) / 2 for n tokens after c cached ones."""
    decode_requests: int = 0
    """Requests that compute one token."""
    context_tokens: int = 0
    """Tokens whose KV they read, the new ones included."""


def prefill_pairs(new_tokens: int, cached_tokens: int) -> float:
    """Count the (query, key) pairs of a chunk. See `StepShape.prefill_pairs`."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2


class HostView(Struct, frozen=True, kw_only=True):
    """One host's KV blocks. free + used + cached = total, always."""

    id: HostId
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int


class TierHit(Struct, frozen=True, array_like=True):
    """How much of a prompt a host has once so much was read from the tiers below its arena."""

    tokens: int
    """Leading prompt tokens, those in the arena included."""
    load_s: float
    """Until they are in the arena, as measured: behind what is read already."""


class FlightView(Struct, frozen=True, kw_only=True):
    """One request that a worker has, as the coordinator knows it. How long its answer gets, nobody knows."""

    request: Request
    worker: WorkerId
    started_at_s: float
    """When that worker was told to go on with it."""


class LoadWindow(Struct, frozen=True, kw_only=True):
    """What went through the cluster between two ticks: the history that roles, scaling and forecasts decide from."""

    end_s: float
    window_s: float
    arrived_requests: int = 0
    arrived_tokens: int = 0
    """Prompt tokens of what arrived."""
    rejected_requests: int = 0
    prefilled_requests: int = 0
    """First tokens that came out."""
    ttft_s: float = 0.0
    """Mean of those. 0 where there was none."""
    finished_requests: int = 0
    output_tokens: int = 0
    """Of what finished."""
    tpot_s: float = 0.0
    """Mean over what finished with two tokens or more. 0 where there was none."""
    slo_ttft_s: float = 0.0
    """Tightest TTFT that was promised to anything that arrived. 0: nothing was promised."""
    slo_tpot_s: float = 0.0
    """The same of TPOT."""


class BoundLoad(Struct, frozen=True, array_like=True):
    """Requests that will decode on a worker, and whose prompts are still computed elsewhere."""

    requests: int
    tokens: int
    """Of their prompts, whose KV is on its way."""


_PLACE = attrgetter("host", "kind")


class ClusterView(Struct, frozen=True, kw_only=True, gc=False):
    """Everything that a policy may know about the cluster."""

    workers: tuple[WorkerView, ...]
    prefix_hit_tokens: dict[HostId, int]
    """Leading prompt tokens of the request in question that a host's arena holds. A hint: it may be stale."""
    expected_output_tokens: float = 0.0
    """Output tokens that the request in question is predicted to have, from those that finished. 0: none has yet."""
    waiting_requests: int = 0
    """Requests in the coordinator's waiting room."""

    tier_hits: dict[HostId, tuple[TierHit, ...]] = {}
    """What the tiers of a host can add to that, the shortest first. Hosts whose tiers add nothing are left out.

    Each ends where another tier begins, so the best place to stop reading is one of them, or where the arena ends."""
    starting: dict[Role, int] = {}
    """Workers that were asked for and have not joined yet."""
    bound: dict[WorkerId, BoundLoad] = {}
    """What is to decode on a worker soon: its own view does not count it yet. Workers without any are left out."""
    first_token_by: Literal["prefill", "decode"] = "prefill"
    """Who draws the first token of the request in question, where its prompt is handed off."""
    is_sent_ahead: bool = False
    """Its KV goes to where it will be decoded while the prompt is computed."""

    def having(self, role: Role) -> list[WorkerView]:
        """Workers that may do this role's work: its own, and mixed ones."""
        roles = (role, "mixed")
        return [worker for worker in self.workers if worker.role in roles]

    def kinds_on(self, host: HostId | None) -> set[str]:
        """Kinds of the workers that share a host, and so its wire. Empty where it has none, or there is no host."""
        return {kind for at, kind in set(map(_PLACE, self.workers)) if at == host}
