"""Compute the token masks of a worker's requests in sandboxes, while the worker computes its steps.

A grammar that takes too long delays its own request: its slice gets no token in this step and is computed again in the
next one. A grammar that ends its sandbox fails its own request; the others are sent to a new sandbox.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.sandbox.messages import PARSERS_MAX, MaskAnswer, MaskComputation, MaskJob, SandboxSetup
from baton.compute.sandbox.process import ForkServer, Sandbox, SandboxError
from baton.core.config import SandboxConfig
from baton.core.step import Slice
from baton.core.types import GRAMMAR_FAILED, Grammar, RequestId
from baton.move.clock import now_s

STEP_WAIT_S = 0.05
"""Maximum time that a step waits at its end for late masks. Bounds the delay of the other requests."""
DEATHS_MAX = 2
"""A grammar that has ended this many sandboxes is refused."""
POISON_MAX = 1024
"""Maximum number of grammars whose ended sandboxes are counted. The oldest is forgotten first."""


@dataclass(slots=True)
class _Deadline:
    """The end of the time that a step waits for late masks, which begins with the first wait."""

    wait_s: float
    end_s: float = math.inf

    def remaining_s(self) -> float:
        self.end_s = min(self.end_s, now_s() + self.wait_s)
        return max(0.0, self.end_s - now_s())


@dataclass(slots=True, eq=False)
class RequestMasks:
    """Implements `AllowedTokens`: the masks of one slice. No rows: they are late, or the request fails."""

    part: Slice
    grammar: Grammar
    output: list[int]
    process: _MaskProcess
    deadline: _Deadline
    answer: MaskAnswer | None = None
    _is_awaited: bool = field(default=False, init=False)

    def rows(self) -> Sequence[bytes]:
        if not self._is_awaited:
            self._is_awaited = True
            self.process.wait(self)
        return [] if self.answer is None else self.answer.rows

    @property
    def failure(self) -> str:
        """The reason why the request fails, or an empty string."""
        return "" if self.answer is None else self.answer.problem

    @property
    def drafts(self) -> list[int]:
        return list(self.part.tokens[self.part.start + self.part.count - self.part.drafts :][: self.part.drafts])

    def is_same_job(self, other: RequestMasks) -> bool:
        if self.part.request_id != other.part.request_id or self.grammar != other.grammar:
            return False
        return self.output == other.output and self.drafts == other.drafts


class MaskSandboxes:
    """The sandboxes of one worker. All requests with the same grammar share a sandbox. Not thread-safe."""

    def __init__(self, card: ModelCard, limits: SandboxConfig) -> None:
        """Start no sandbox yet: one takes 70 MB and a second of CPU time, and most workers never see a grammar."""
        self._server = ForkServer(SandboxSetup(MaskComputation(card), limits))
        self._stream_wait_s = 2 * limits.wall_s
        self._processes = [_MaskProcess(self._server) for _ in range(limits.processes)]

    def begin(self, parts: Sequence[Slice]) -> list[RequestMasks]:
        """Start to compute the masks of slices that sample. Does not wait."""
        deadline = _Deadline(STEP_WAIT_S)
        started = [self._masks(part, deadline) for part in parts]
        for process in self._processes:
            process.begin([masks for masks in started if masks.process is process])
        return started

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._server.close()

    def _masks(self, part: Slice, deadline: _Deadline) -> RequestMasks:
        grammar = part.sampling.grammar
        assert grammar is not None, f"{part.request_id} has no grammar"
        output = list(part.tokens[part.prompt_tokens : part.start + part.count - part.drafts])
        process = self._processes[hash(grammar.text) % len(self._processes)]
        # The KV of a streamed slice is sent during its step, so the slice cannot be computed again.
        deadline = deadline if part.stream is None else _Deadline(self._stream_wait_s)
        return RequestMasks(part, grammar, output, process, deadline)


class _MaskProcess:
    """Sends jobs to one sandbox at a time, and replaces the sandbox when it ends."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="mask-sandbox")
        self._starting: Future[Sandbox] | None = None
        self._sandbox: Sandbox | None = None
        self._has_answered = False
        """The current sandbox has answered a job, so its memory may include that of earlier jobs."""
        self._retried_job: RequestMasks | None = None
        """Job to send first to the next sandbox: it broke a memory limit, perhaps because of earlier jobs."""
        self._outstanding: deque[RequestMasks] = deque()
        self._last: OrderedDict[RequestId, RequestMasks] = OrderedDict()
        """The last answered job of each request. The request's parser in the sandbox has read that job's output."""
        self._deaths: OrderedDict[Grammar, int] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(MaskAnswer)

    def begin(self, step: Sequence[RequestMasks]) -> None:
        """Send the jobs of a step, unless the sandbox is still busy with those of an earlier step."""
        if not step:
            return
        with suppress(SandboxError):
            self._receive(0.0)
        is_idle = self._sandbox is not None and not self._outstanding
        for masks in step:
            self._take_late(masks)
            if self._deaths.get(masks.grammar, 0) >= DEATHS_MAX:
                masks.answer = _failed(f"{DEATHS_MAX} sandbox processes died on it; send a simpler one")
            if is_idle and masks.answer is None:
                self._send(masks)

    def wait(self, masks: RequestMasks) -> None:
        """Wait for the masks of a slice, but not longer than its step may wait."""
        while masks.answer is None:
            remaining_s = masks.deadline.remaining_s()
            if self._sandbox is not None and not self._outstanding:
                self._send(masks)
            try:
                self._receive(remaining_s)
            except SandboxError as error:
                masks.answer = MaskAnswer(problem=str(error))
            self._take_late(masks)
            if not remaining_s:
                return

    def close(self) -> None:
        self._starter.shutdown(cancel_futures=True)
        if self._sandbox is not None:
            self._sandbox.close()

    def _take_late(self, masks: RequestMasks) -> None:
        """Use the answer to the same job of an earlier step, if it has arrived."""
        late = self._last.get(masks.part.request_id)
        if late is not None and late is not masks and late.is_same_job(masks):
            masks.answer = late.answer

    def _send(self, masks: RequestMasks, *, whole: bool = False) -> None:
        """Send a job: only the output tokens that the request's parser has not read, or the `whole` output."""
        assert self._sandbox is not None
        last = self._last.get(masks.part.request_id)
        is_known = last is not None and not last.failure and not whole and last.grammar == masks.grammar
        skipped = len(last.output) if last is not None and is_known else 0
        if last is not None and last.output != masks.output[:skipped]:
            skipped = 0
        job = MaskJob(
            request_id=masks.part.request_id,
            grammar=masks.grammar,
            output=masks.output[skipped:],
            skipped=skipped,
            drafts=masks.drafts,
            stop_token_ids=masks.part.sampling.stop_token_ids,
        )
        self._outstanding.append(masks)
        self._sandbox.put(self._encoder.encode(job))

    def _receive(self, wait_s: float) -> None:
        """Wait until the sandbox has started, answers or ends, at most `wait_s`.

        Raises SandboxError if it cannot be started.
        """
        sandbox = self._started(wait_s)
        if sandbox is None:
            return
        try:
            answers = sandbox.answers(wait_s)
        except EOFError:
            self._record_end(sandbox)
            return
        for answer in answers:
            self._note(self._outstanding.popleft(), answer)

    def _started(self, wait_s: float) -> Sandbox | None:
        """Return the sandbox once it has started. The first one takes up to a second: it loads the vocabulary."""
        if self._sandbox is None:
            if self._starting is None:
                self._starting = self._starter.submit(self._server.fork)
            if not wait((self._starting,), wait_s).done:
                return None
            starting, self._starting = self._starting, None
            self._sandbox, self._has_answered = starting.result(), False
            if self._retried_job is not None:
                retried, self._retried_job = self._retried_job, None
                self._send(retried, whole=True)
            return None
        return self._sandbox

    def _note(self, masks: RequestMasks, answer: bytes | SandboxError) -> None:
        found = _failed(str(answer)) if isinstance(answer, SandboxError) else self._decoder.decode(answer)
        if found.is_unknown:
            self._send(masks, whole=True)
            return
        masks.answer = found
        self._has_answered = True
        self._remember(masks)

    def _record_end(self, sandbox: Sandbox) -> None:
        """Fail the request whose job has ended the sandbox. The others are sent again to the next sandbox."""
        reason = self._server.end_reason(sandbox)
        self._sandbox = None
        self._last.clear()
        if reason is None:
            self._outstanding.clear()
        elif self._outstanding:
            culprit = self._outstanding.popleft()
            self._outstanding.clear()
            if reason.is_memory_limit and self._has_answered:
                self._retried_job = culprit
                return
            deaths = self._deaths.pop(culprit.grammar, 0) + 1
            self._deaths[culprit.grammar] = deaths
            if len(self._deaths) > POISON_MAX:
                self._deaths.popitem(last=False)
            if reason.is_lasting or deaths >= DEATHS_MAX:
                culprit.answer = _failed(str(reason))
                self._remember(culprit)

    def _remember(self, masks: RequestMasks) -> None:
        self._last.pop(masks.part.request_id, None)
        self._last[masks.part.request_id] = masks
        if len(self._last) > PARSERS_MAX:
            self._last.popitem(last=False)


def _failed(reason: str) -> MaskAnswer:
    return MaskAnswer(problem=f"{GRAMMAR_FAILED}: {reason}")
