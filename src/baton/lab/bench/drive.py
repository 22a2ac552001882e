"""Send the requests of a load on time, and keep the replies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import structs

from baton.lab.bench.client import Client, Reply
from baton.lab.bench.probe import Target
from baton.lab.bench.wire import Message, Prompt, request_fields
from baton.lab.workload.conversation import TURN_LOST, Conversations, Turn, link_conversations
from baton.lab.workload.prompts import PromptMaker
from baton.lab.workload.request import TraceRequest
from baton.move.clock import now_s

PREPARED_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of request bodies that are made ahead of time, so that making a body delays no request."""
_MARGIN_S = 0.01
"""A body is only made ahead of time if no request is due within this time."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with its body."""

    index: int
    request: TraceRequest
    body: bytes
    messages: tuple[Message, ...] = ()
    """The conversation so far, up to this request's question. Empty if no turn follows."""


@dataclass(slots=True, kw_only=True)
class LoadGenerator:
    """Sends requests to one target. `replies` grows as answers end, so an interrupted run keeps its replies."""

    client: Client
    target: Target
    prompts: PromptMaker
    ignore_eos: bool
    on_reply: Callable[[Reply], None] = lambda reply: None
    replies: list[Reply] = field(default_factory=list[Reply])
    linked: Conversations = field(default_factory=Conversations)

    async def closed_loop(self, requests: Sequence[TraceRequest], concurrency: int) -> None:
        """Run `concurrency` clients; each sends the next request as soon as its last one was answered."""
        self.linked = link_conversations(requests)
        upcoming = iter(self.linked.openers)

        async def one_client() -> None:
            for index, request in upcoming:
                await self._fire(self._prepare(index, request), None)

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(self.linked.openers))):
                clients.create_task(one_client())

    async def open_loop(self, requests: Sequence[TraceRequest]) -> None:
        """Send each request at its `at_s`, however many are unanswered."""
        self.linked = link_conversations(requests)
        upcoming = deque(self.linked.openers)
        ready: deque[PreparedRequest] = deque()
        ready_bytes = 0
        start_s: float | None = None
        async with asyncio.TaskGroup() as open_requests:
            while upcoming or ready:
                while upcoming and (
                    not ready or (ready_bytes < PREPARED_BYTES_MAX and _idle(start_s, ready[0].request))
                ):
                    ready.append(self._prepare(*upcoming.popleft()))
                    ready_bytes += len(ready[-1].body)
                    await asyncio.sleep(0)  # lets answers be read between two prompts
                start_s = now_s() if start_s is None else start_s
                prepared = ready.popleft()
                ready_bytes -= len(prepared.body)
                due_s = start_s + prepared.request.at_s
                await asyncio.sleep(max(0.0, due_s - now_s()))
                open_requests.create_task(self._fire(prepared, due_s))

    def _prepare(self, index: int, request: TraceRequest) -> PreparedRequest:
        if self.target.prompt_format == "ids":
            return PreparedRequest(index, request, self._body(self.prompts.token_ids(request, index), request))
        text = self.prompts.text(request, index)
        messages = (Message("user", text),) if self.linked.is_followed(index) else ()
        return PreparedRequest(index, request, self._body(text, request), messages)

    def _prepare_turn(self, turn: Turn, messages: tuple[Message, ...]) -> PreparedRequest:
        """Return a turn with its request body.

        The body has the conversation so far and the turn's new words, as chat messages or as one text.
        """
        words = self.prompts.text(turn.request, turn.index).split(" ")
        own = " ".join(words[min(turn.known_tokens, len(words) - 1) :])
        messages = (*messages, Message("user", own))
        if self.target.endpoint == "chat":
            return PreparedRequest(turn.index, turn.request, self._body(list(messages), turn.request), messages)
        text = " ".join(message.content.strip(" ") for message in messages)
        return PreparedRequest(turn.index, turn.request, self._body(text, turn.request), messages)

    def _body(self, prompt: Prompt, request: TraceRequest) -> bytes:
        fields = request_fields(
            model=self.target.model,
            endpoint=self.target.endpoint,
            prompt=prompt,
            output_tokens=request.output_tokens,
            ignore_eos=self.ignore_eos,
        )
        return msgspec.json.encode({**fields, "user": request.tenant} if request.tenant else fields)

    async def _fire(self, prepared: PreparedRequest, due_s: float | None) -> None:
        """Send a request, then the turns that follow it, each `think_s` after the previous answer."""
        following: PreparedRequest | None = prepared
        while following is not None:
            prepared = following
            reply = await self.client.ask(
                self.target.path,
                prepared.body,
                request=prepared.request,
                index=prepared.index,
                due_s=due_s,
                keep_text=bool(prepared.messages),
            )
            self._note(reply)
            following, due_s = await self._next_turn(prepared, reply), None

    def _note(self, reply: Reply) -> None:
        self.replies.append(reply)
        self.on_reply(reply)

    async def _next_turn(self, prepared: PreparedRequest, reply: Reply) -> PreparedRequest | None:
        """Wait for the think time and return the next turn. None: the conversation is over.

        The turns after a failed or rejected request have the same outcome, as in the simulator.
        """
        if reply.record.outcome != "finished":
            for turn in self.linked.take_rest(prepared.index):
                self._note(_lost_reply(turn, reply))
        turn = self.linked.take_next(prepared.index)
        if turn is None:
            return None
        await asyncio.sleep(turn.request.think_s or 0.0)
        return self._prepare_turn(turn, (*prepared.messages, Message("assistant", reply.text)))


def _lost_reply(turn: Turn, before: Reply) -> Reply:
    """Return the reply to a turn that is not sent, because the request before it did not finish."""
    request, record = turn.request, before.record
    lost = structs.replace(
        record, arrival_s=record.end_s, input_tokens=request.input_tokens, token_times_s=(), slo=request.slo
    )
    return replace(before, index=turn.index, record=lost, reason=TURN_LOST, asked_tokens=0, late_s=0.0)


def _idle(start_s: float | None, upcoming: TraceRequest) -> bool:
    """Return whether no request is due so soon that making a body could delay it."""
    return start_s is None or start_s + upcoming.at_s - now_s() > _MARGIN_S
