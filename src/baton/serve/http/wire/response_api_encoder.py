"""Encode responses of OpenAI's Responses API: a response, or the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import json, to_builtins

from baton.serve.http.choice import ChoiceDelta
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.encoders import ResponseHead, WholeChoice, tool_calls
from baton.serve.http.wire.response_api import ResponsesRequest
from baton.serve.http.wire.response_items import (
    Item,
    answer_of,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from baton.serve.http.wire.responses import ChatFinish, Usage
from baton.serve.live.live_request import Timings


class ResponsesEncoder:
    """Encodes one response. Its items are opened and closed as reasoning, text and tool calls take turns."""

    def __init__(self, head: ResponseHead, asked: ResponsesRequest, conversation: Conversation) -> None:
        self._head = head
        self._asked = asked
        self._conversation = conversation
        self._items: list[Item] = []
        """The items so far. The last one may be open."""
        self._open: int | Literal["text", "reasoning"] | None = None
        """The open item: `text`, `reasoning`, or the index of its tool call. None: there is none."""
        self._finish: ChatFinish = "stop"
        self._sent = 0
        """Number of events so far."""

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        events: list[bytes] = []
        if first:
            events = [self._event(f"response.{name}", {"response": self._response()}) for name in _BEGUN]
        for part in delta.continued_calls:
            events += self._call(part)
        if delta.reasoning:
            events += self._grow("reasoning", delta.reasoning)
        if delta.text:
            events += self._grow("text", delta.text)
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
        self._finish = finish_reason
        return b"".join(self._close(_status(finish_reason)))

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        status = _status(self._finish)
        response = self._response(status, usage, timings)
        self._store(json.encode(response))
        return self._event(f"response.{status}", {"response": response})

    def end(self, usage: Usage, timings: Timings) -> bytes:
        return b""

    def error(self, body: bytes) -> bytes:
        error = json.decode(body)["error"]
        return self._event("error", {name: error.get(name) for name in ("code", "message", "param")})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        [choice] = choices
        status = _status(choice.chat_finish)
        if choice.reasoning:
            self._items.append(reasoning_item(self._item_id(), "completed", [reasoning_part(choice.reasoning)]))
        if choice.text:
            self._items.append(message_item(self._item_id(), "completed", [text_part(choice.text)]))
        for call in tool_calls(choice.calls):
            self._items.append(call_item(call.id, call.function.name, call.function.arguments, "completed"))
        if self._items:
            self._items[-1]["status"] = status
        body = json.encode(self._response(status, usage, timings))
        self._store(body)
        return body

    # ---- items

    def _grow(self, kind: Literal["text", "reasoning"], text: str) -> list[bytes]:
        """Add text to the open item. Opens one if the last item is of another kind."""
        events: list[bytes] = []
        made, part, name = _KINDS[kind]
        if self._open != kind:
            events += self._next_item(kind, made(self._item_id(), "in_progress", []))
            events.append(self._part_event("content_part.added", {"part": part("")}))
            self._items[-1]["content"] = [part("")]
        self._items[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        events.append(self._part_event(f"{name}.delta", {"delta": text, **logprobs}))
        return events

    def _call(self, part: CallPart) -> list[bytes]:
        events: list[bytes] = []
        if self._open != part.index:
            events += self._next_item(part.index, call_item(part.id or "", part.name or "", "", "in_progress"))
        if part.arguments:
            self._items[-1]["arguments"] += part.arguments
            events.append(self._item_event("function_call_arguments.delta", {"delta": part.arguments}))
        return events

    def _next_item(self, opened: int | Literal["text", "reasoning"], item: Item) -> list[bytes]:
        events = self._close("completed")
        self._open = opened
        self._items.append(item)
        place = {"output_index": len(self._items) - 1}
        return [*events, self._event("response.output_item.added", {**place, "item": item})]

    def _close(self, status: str) -> list[bytes]:
        """Return the events that close the open item, if there is one."""
        if self._open is None:
            return []
        item, events = self._items[-1], list[bytes]()
        item["status"] = status
        if isinstance(self._open, str):
            part, name = item["content"][0], _KINDS[self._open][2]
            logprobs: dict[str, Any] = {"logprobs": []} if self._open == "text" else {}
            events.append(self._part_event(f"{name}.done", {"text": part["text"], **logprobs}))
            events.append(self._part_event("content_part.done", {"part": part}))
        else:
            events.append(self._item_event("function_call_arguments.done", {"arguments": item["arguments"]}))
        self._open = None
        place = {"output_index": len(self._items) - 1}
        return [*events, self._event("response.output_item.done", {**place, "item": item})]

    def _item_id(self) -> str:
        return f"{self._head.id}_{len(self._items)}"

    def _store(self, body: bytes) -> None:
        self._conversation.store(self._head.id, body, answer_of(self._items))

    # ---- events

    def _part_event(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._item_event(name, {"content_index": 0, **fields})

    def _item_event(self, name: str, fields: dict[str, Any]) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{name}", {**place, **fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = {"type": name, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), json.encode(body))

    def _response(
        self, status: str = "in_progress", usage: Usage | None = None, timings: Timings | None = None
    ) -> dict[str, Any]:
        asked = self._asked
        text = to_builtins(asked.text.format) if asked.text is not None and asked.text.format is not None else None
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._head.model,
            "output": self._items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "store": asked.store is not False,
            "temperature": asked.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": to_builtins(asked.tool_choice) or "auto",
            "tools": to_builtins(asked.tools or []),
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.user,
            "metadata": asked.metadata or {},
            **({} if timings is None else {"timings": timings}),
        }


_BEGUN = ("created", "in_progress")
_KINDS = {
    "text": (message_item, text_part, "output_text"),
    "reasoning": (reasoning_item, reasoning_part, "reasoning_text"),
}
"""How to make an item and its part, and the name of its events."""


def _status(finish: ChatFinish) -> str:
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,  # only where a client asks for writes; every prompt is cached here
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
