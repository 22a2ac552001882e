"""A request in the live server: its tokens so far, its result, and its timings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from baton.core.messages import Outcome, RejectReason
from baton.core.types import FinishReason, OutputToken, Prediction, Request, WorkerId

NOT_PREDICTED = Prediction(0.0, 0.0)
UPDATE_TOKENS_MAX = 32
"""Maximum tokens of an update. Encoding more delays other streams: 1,000 tokens with log probabilities take 75 ms."""


class Timings(Struct, frozen=True, kw_only=True):
    """Seconds that a request spent in each phase, as part of every response. None: the phase did not happen."""

    queue_s: float | None = None
    """From arrival to the first step that computes a part of the prompt."""
    prefill_s: float | None = None
    """From the end of `queue_s` to the first token. If the decode worker draws that token: to the end of the prompt."""
    handoff_s: float | None = None
    """From the end of prefill to the first step on the decode worker. None: there was no handoff."""
    first_decode_s: float | None = None
    """From the end of prefill to the decode worker's first token."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    attempts: int = 1
    """1, plus one for each worker that was lost while it ran the request."""
    moves: int | UnsetType = UNSET
    """Number of times that the request was stopped on a live worker and continued. Left out if 0."""
    preemptions: int | UnsetType = UNSET
    """Number of times that the request was preempted in favor of older requests. Left out if 0."""
    kv_loss: str | UnsetType = UNSET
    """Precision that the KV lost in a handoff to a host with another KV format. Left out if none was lost."""


class Finish(Struct, frozen=True, kw_only=True):
    """The result of a request."""

    outcome: Outcome
    reason: FinishReason | None = None
    """Set if the outcome is `finished`. `stop`: the last token is a stop token, which is not part of the text."""
    message: str = ""
    """Error message for the client. Empty if the outcome is `finished`."""
    reject: RejectReason | None = None
    retry_after_s: float | None = None
    is_final: bool = False
    """An operator cancelled it: the client must not send it again."""


class Update(Struct, frozen=True, kw_only=True):
    """The tokens since the last update, in order, and the result if the request has ended."""

    tokens: tuple[OutputToken, ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Stamps:
    """Times of a request's events, on the server's clock. None: the event has not happened."""

    arrived_s: float
    started_s: float | None = None
    prefilled_s: float | None = None
    """Time at which the first token arrived."""
    left_s: float | None = None
    """End of the prompt's computation, if another worker draws the first token. Earlier than `prefilled_s`."""
    decoding_s: float | None = None
    """Begin of the step in which the decode worker drew its first token of this request."""
    copied_s: float | None = None
    """Time at which the last KV copied from another host arrived, if that was before `decoding_s`."""
    second_token_s: float | None = None
    first_sent_s: float | None = None
    last_sent_s: float | None = None
    sent_tokens: int = 0
    cached_tokens: int = 0
    moves: int = 0
    """Attempts that began after the request was stopped on a live worker, not because its worker was lost."""
    preemptions: int = 0
    kv_loss: str = ""
    """Precision that the KV lost in a handoff to a host with another KV format."""
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None

    def start(self, worker: WorkerId, now_s: float) -> None:
        """Record the first step of the request on a worker. Does nothing on later workers."""
        if self.started_s is None:
            self.started_s, self.prefill_worker = now_s, self.prefill_worker or worker

    @property
    def handed_s(self) -> float | None:
        """Return the end of prefill, from which on another worker can decode. None: prefill has not ended."""
        return self.prefilled_s if self.left_s is None else self.left_s

    def leave(self, worker: WorkerId | None, now_s: float) -> None:
        """Record that this worker has computed the prompt and that another worker will draw the first token."""
        if self.left_s is None and self.prefilled_s is None:
            self.left_s, self.prefill_worker = now_s, worker

    def token(self, worker: WorkerId, index: int, now_s: float, step_s: float = 0.0) -> None:
        """Record a token from a worker. `step_s`: duration of the step that drew it."""
        if index == 0:
            self.prefilled_s = now_s
        elif index == 1:
            self.second_token_s = now_s
        if index == 0 and self.left_s is None:
            self.prefill_worker = worker
            return
        self.decode_worker = worker
        if self.decoding_s is None and worker != self.prefill_worker:
            self.decoding_s = now_s - step_s

    def sent(self, tokens: int, now_s: float) -> None:
        """Record that the text of `tokens` more tokens reached the client's socket."""
        if self.first_sent_s is None:
            self.first_sent_s = now_s
        self.last_sent_s = now_s
        self.sent_tokens += tokens

    def timings(self, attempts: int) -> Timings:
        """Return the durations between the events."""
        return Timings(
            queue_s=_between(self.arrived_s, self.started_s),
            prefill_s=_between(self.started_s, self.handed_s),
            handoff_s=_between(self.handed_s, self.decoding_s),
            first_decode_s=_between(self.handed_s, self.second_token_s if self.left_s is None else self.prefilled_s),
            ttft_s=_between(self.arrived_s, self.first_sent_s),
            tpot_s=self._tpot_s(),
            e2e_s=_between(self.arrived_s, self.last_sent_s),
            cached_tokens=self.cached_tokens,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            attempts=attempts - self.moves,
            moves=self.moves or UNSET,
            preemptions=self.preemptions or UNSET,
            kv_loss=self.kv_loss or UNSET,
        )

    @property
    def decode_queue_s(self) -> float | None:
        """Return the part of the handoff that is no copying. None: there was no handoff."""
        if self.handed_s is None:
            return None
        return _between(max(self.handed_s, self.copied_s or 0.0), self.decoding_s)

    def copied(self, took_s: float, now_s: float) -> float:
        """Record that copied KV has arrived. Return the seconds of the copy in which the prompt was still computed."""
        if self.decoding_s is None:
            self.copied_s = now_s
        handed_s = now_s if self.handed_s is None else self.handed_s
        return min(took_s, max(0.0, handed_s - (now_s - took_s)))

    def _tpot_s(self) -> float | None:
        elapsed_s = _between(self.first_sent_s, self.last_sent_s)
        return elapsed_s / (self.sent_tokens - 1) if elapsed_s is not None and self.sent_tokens > 1 else None


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return max(0.0, end_s - start_s) if start_s is not None and end_s is not None else None


class LiveRequest:
    """The state of one request. The driver adds tokens and the result; one reader awaits them.

    The request's output limit bounds the unread tokens of a slow reader.
    """

    def __init__(self, request: Request, prompt: Sequence[int]) -> None:
        self.request = request
        self.tokens: list[int] = list(prompt)
        self.attempt = 1
        self.worker: WorkerId | None = None
        """The worker that runs the request. None: no worker has begun it, or the worker was lost."""
        self.stamps = Stamps(request.arrived_at_s)
        self.predicted = NOT_PREDICTED
        self.finish_reason: FinishReason | None = None
        self.stopped = False
        """The client has all the text that it asked for, so that a cancellation counts as `finished`."""
        self.lost_worker = False
        """Its worker was lost after its first step, and no other one has its KV yet."""
        self.was_cancelled_by_operator = False
        """By POST /cluster/cancel: the client must not send it again."""
        self.finish: Finish | None = None
        self._pending: list[OutputToken] = []
        self._is_behind = False
        """The last update did not contain all tokens that had arrived."""
        self._wake: asyncio.Future[None] | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def is_taken(self) -> bool:
        """True if the reader has taken every token so far."""
        return not self._pending

    def push(self, token: OutputToken, worker: WorkerId, now_s: float, step_s: float = 0.0) -> bool:
        """Add a token from a step that took `step_s` seconds.

        Return False, and drop the token, if it is a repeated one or belongs to an earlier attempt.
        """
        if token.attempt != self.attempt or token.index != self.output_tokens:
            return False
        self.stamps.token(worker, token.index, now_s, step_s)
        self.tokens.append(token.token)
        self._pending.append(token)
        self._notify()
        return True

    def close(self, finish: Finish) -> None:
        """End the request, and wake its reader."""
        self.finish = finish
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def next(self) -> Update:
        """Wait for new tokens or the result. A slow reader gets the tokens of several steps in one update.

        A reader that falls behind lets other tasks run between two updates. Do not call this again after the result.
        """
        if self._is_behind:
            await asyncio.sleep(0)
        while not self._pending and self.finish is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        tokens = tuple(self._pending[:UPDATE_TOKENS_MAX])
        del self._pending[:UPDATE_TOKENS_MAX]
        self._is_behind = bool(self._pending)
        return Update(tokens=tokens, finish=None if self._is_behind else self.finish)

    def timings(self) -> Timings:
        return self.stamps.timings(self.attempt)
