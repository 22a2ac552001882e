"""Encode responses of Anthropic's Messages API: a message, or the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import json

from baton.serve.http.choice import ChoiceDelta
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.encoders import ResponseHead, WholeChoice, tool_calls
from baton.serve.http.wire.errors import anthropic_error
from baton.serve.http.wire.responses import ChatFinish, Usage
from baton.serve.live.live_request import Timings

_STOP_REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesEncoder:
    """Encodes one message. Its blocks are opened and closed as text and tool calls take turns."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._blocks = 0
        """Number of blocks that were opened."""
        self._open: int | str | None = None
        """The open block: `text`, or the index of its tool call. None: there is none."""
        self._stop: dict[str, str | None] = {}

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        events = [self._start()] if first else []
        for part in delta.continued_calls:
            events += self._call(part)
        if delta.text:
            if self._open != "text":
                events += self._next_block("text", {"type": "text", "text": ""})
            events.append(self._block_delta({"type": "text_delta", "text": delta.text}))
        for part in delta.calls[len(delta.continued_calls) :]:
            events += self._call(part)
        return b"".join(events)

    def last(
        self,
        index: int,
        finish_reason: ChatFinish,
        timings: Timings,
        *,
        stop_string: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        self._stop = _stop(finish_reason, stop_string)
        return b"".join(self._close())

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        body = {"type": "message_delta", "delta": self._stop, "usage": _usage(usage), "timings": timings}
        return _event("message_delta", body)

    def end(self, usage: Usage, timings: Timings) -> bytes:
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def error(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + anthropic_error(body) + b"\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        [choice] = choices
        content: list[dict[str, Any]] = [{"type": "text", "text": choice.text}] if choice.text else []
        for call in tool_calls(choice.calls):
            arguments = call.function.arguments
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.function.name, "input": _arguments(arguments)}
            )
        stop = _stop(choice.chat_finish, choice.stop_string)
        return json.encode({**self._message(content), **stop, "usage": _usage(usage), "timings": timings})

    def _start(self) -> bytes:
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", {"type": "message_start", "message": message})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "type": "message", "role": "assistant", "model": head.model, "content": content}

    def _call(self, part: CallPart) -> list[bytes]:
        events: list[bytes] = []
        if self._open != part.index:
            events = self._next_block(part.index, {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        if part.arguments:
            events.append(self._block_delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return events

    def _next_block(self, block: int | str, content: dict[str, Any]) -> list[bytes]:
        events = self._close()
        self._open, self._blocks = block, self._blocks + 1
        body = {"type": "content_block_start", "index": self._blocks - 1, "content_block": content}
        return [*events, _event("content_block_start", body)]

    def _block_delta(self, delta: dict[str, str]) -> bytes:
        body = {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}
        return _event("content_block_delta", body)

    def _close(self) -> list[bytes]:
        """Return the event that closes the open block, if there is one."""
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", {"type": "content_block_stop", "index": self._blocks - 1})]


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.encode(body))


def _stop(finish_reason: ChatFinish, stop_string: str | None) -> dict[str, str | None]:
    reason = _STOP_REASON[finish_reason] if stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_string}


def _usage(usage: Usage) -> dict[str, int]:
    """Return the token counts. In Anthropic's API, `input_tokens` leaves out the cached ones."""
    cached_tokens = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Empty if the model was cut off, or wrote no JSON object."""
    try:
        found = json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
