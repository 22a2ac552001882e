"""One request in the live server: its tokens so far, which are the truth about it, and where its time went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from baton.core.types import FinishReason, OutputToken, Request, WorkerId
from baton.serve.live.port import Finish, Timings, Update


@dataclass(slots=True)
class Stamps:
    """Moments of one request on the server's clock. None: has not happened."""

    arrived_s: float
    started_s: float | None = None
    prefilled_s: float | None = None
    """The first token came in."""
    left_s: float | None = None
    """Before that: the prompt was computed, and the first token left to another worker."""
    decoding_s: float | None = None
    """Another worker than the one that computed the prompt began the step that drew its first token of it."""
    second_token_s: float | None = None
    first_sent_s: float | None = None
    last_sent_s: float | None = None
    sent_tokens: int = 0
    cached_tokens: int = 0
    moves: int = 0
    """Attempts that began because a policy moved it, not because its worker was lost."""
    preemptions: int = 0
    kv_loss: str = ""
    """What its KV lost on the way to another host."""
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None

    def start(self, worker: WorkerId, now_s: float) -> None:
        """A worker has a request that has no token in a step for the first time (of its own)."""
        if self.started_s is None:
            self.started_s, self.prefill_worker = now_s, self.prefill_worker or worker

    @property
    def handed_s(self) -> float | None:
        """When the prompt was done, and whoever decodes could begin."""
        return self.prefilled_s if self.left_s is None else self.left_s

    def leave(self, worker: WorkerId | None, now_s: float) -> None:
        """The prompt is computed by this worker, which leaves the first token to another."""
        if self.left_s is None and self.prefilled_s is None:
            self.left_s, self.prefill_worker = now_s, worker

    def token(self, worker: WorkerId, index: int, now_s: float, step_s: float = 0.0) -> None:
        """A token has come in from a worker. `step_s`: what the step took that drew it."""
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
        if self.first_sent_s is None:
            self.first_sent_s = now_s
        self.last_sent_s = now_s
        self.sent_tokens += tokens

    def timings(self, attempts: int) -> Timings:
        """Take the differences."""
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

    def _tpot_s(self) -> float | None:
        elapsed_s = _between(self.first_sent_s, self.last_sent_s)
        return elapsed_s / (self.sent_tokens - 1) if elapsed_s is not None and self.sent_tokens > 1 else None


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return max(0.0, end_s - start_s) if start_s is not None and end_s is not None else None


class LiveRequest:
    """Implements `Generation`. News is bounded by the request's own output limit, however slow its reader."""

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        *,
        end: Callable[[LiveRequest], None],
        sent: Callable[[LiveRequest, int], None],
    ) -> None:
        self.request = request
        self.tokens: list[int] = list(prompt)
        self.attempt = 1
        self.worker: WorkerId | None = None
        """Who was last told to work on it."""
        self.stamps = Stamps(request.arrived_at_s)
        self.finish_reason: FinishReason | None = None
        self.stopped = False
        """The client has all that it asked for: what ends now, ends as finished."""
        self.finish: Finish | None = None
        self._end = end
        self._sent = sent
        self._pending: list[OutputToken] = []
        self._wake: asyncio.Future[None] | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def is_taken(self) -> bool:
        """Its reader has taken every token that came."""
        return not self._pending

    def push(self, token: OutputToken, worker: WorkerId, now_s: float, step_s: float = 0.0) -> bool:
        """Take a token in, of a step that took `step_s`.

        False for one that is not the next: a repeated one, or of an attempt that was given up.
        """
        if token.attempt != self.attempt or token.index != self.output_tokens:
            return False
        self.stamps.token(worker, token.index, now_s, step_s)
        self.tokens.append(token.token)
        self._pending.append(token)
        self._notify()
        return True

    def close(self, finish: Finish) -> None:
        self.finish = finish
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def next(self) -> Update:
        """See `Generation.next`."""
        while not self._pending and self.finish is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        update = Update(tokens=tuple(self._pending), finish=self.finish)
        self._pending.clear()
        return update

    def stop(self) -> None:
        """See `Generation.stop`."""
        self.stopped = True
        self._end(self)

    def cancel(self) -> None:
        """See `Generation.cancel`."""
        self._end(self)

    def mark_sent(self, tokens: int) -> None:
        """See `Generation.mark_sent`."""
        self._sent(self, tokens)

    def timings(self) -> Timings:
        """See `Generation.timings`."""
        return self.stamps.timings(self.attempt)
