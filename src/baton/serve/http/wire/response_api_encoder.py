"""Encode responses of OpenAI's Responses API: a response, or the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import json, to_builtins

from baton.serve.http.choice import ChoiceDelta
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.encoders import ResponseHead, WholeChoice, tool_calls
from baton.serve.http.wire.response_api import ResponsesRequest, called_message
from baton.serve.http.wire.responses import ChatFinish, Usage
from baton.serve.http.wire.schemas import CalledFunction, ChatMessage, MessageToolCall
from baton.serve.live.live_request import Timings

Item = dict[str, Any]


class ResponsesEncoder:
    """Encodes one response. Its items are opened and closed as text and tool calls take turns."""

    END = b""

    def __init__(self, head: ResponseHead, asked: ResponsesRequest, conversation: Conversation) -> None:
        self._head = head
        self._asked = asked
        self._conversation = conversation
        self._items: list[Item] = []
        """The items so far. The last one may be open."""
        self._open: int | str | None = None
        """The open item: `text`, or the index of its tool call. None: there is none."""
        self._finish: ChatFinish = "stop"
        self._sent = 0
        """Number of events so far."""

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        events: list[bytes] = []
        if first:
            events = [self._event(f"response.{name}", {"response": self._response()}) for name in _BEGUN]
        if delta.text:
            events += self._text(delta.text)
        for part in delta.calls:
            events += self._call(part)
        return b"".join(events)

    def last(self, index: int, finish_reason: ChatFinish, timings: Timings, *, stop_string: str | None = None) -> bytes:
        self._finish = finish_reason
        return b"".join(self._close(_status(finish_reason)))

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        status = _status(self._finish)
        response = self._response(status, usage, timings)
        self._store(json.encode(response))
        return self._event(f"response.{status}", {"response": response})

    def error(self, body: bytes) -> bytes:
        error = json.decode(body)["error"]
        return self._event("error", {name: error.get(name) for name in ("code", "message", "param")})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        [choice] = choices
        status = _status(choice.chat_finish)
        if choice.text:
            self._items.append(self._message("completed", choice.text))
        for call in tool_calls(choice.calls):
            self._items.append(_call_item(call.id, call.function.name, call.function.arguments, "completed"))
        if self._items:
            self._items[-1]["status"] = status
        body = json.encode(self._response(status, usage, timings))
        self._store(body)
        return body

    # ---- items

    def _text(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._open != "text":
            events += self._next_item("text", self._message("in_progress", None))
            events.append(self._part_event("content_part.added", {"part": _text_part("")}))
            self._items[-1]["content"] = [_text_part("")]
        self._items[-1]["content"][0]["text"] += text
        events.append(self._part_event("output_text.delta", {"delta": text, "logprobs": []}))
        return events

    def _call(self, part: CallPart) -> list[bytes]:
        events: list[bytes] = []
        if self._open != part.index:
            events += self._next_item(part.index, _call_item(part.id or "", part.name or "", "", "in_progress"))
        if part.arguments:
            self._items[-1]["arguments"] += part.arguments
            events.append(self._item_event("function_call_arguments.delta", {"delta": part.arguments}))
        return events

    def _next_item(self, opened: int | str, item: Item) -> list[bytes]:
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
        if self._open == "text":
            part = item["content"][0]
            events.append(self._part_event("output_text.done", {"text": part["text"], "logprobs": []}))
            events.append(self._part_event("content_part.done", {"part": part}))
        else:
            events.append(self._item_event("function_call_arguments.done", {"arguments": item["arguments"]}))
        self._open = None
        place = {"output_index": len(self._items) - 1}
        return [*events, self._event("response.output_item.done", {**place, "item": item})]

    def _message(self, status: str, text: str | None) -> Item:
        content = [] if text is None else [_text_part(text)]
        number = len(self._items)
        return {
            "id": f"msg_{self._head.id}_{number}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _store(self, body: bytes) -> None:
        texts = [part["text"] for item in self._items if item["type"] == "message" for part in item["content"]]
        calls = [
            MessageToolCall(id=item["call_id"], function=CalledFunction(name=item["name"], arguments=item["arguments"]))
            for item in self._items
            if item["type"] == "function_call"
        ]
        text = "".join(texts)
        answer = called_message(calls, text or None) if calls else ChatMessage(role="assistant", content=text)
        self._conversation.store(self._head.id, answer, body)

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


def _status(finish: ChatFinish) -> str:
    return "incomplete" if finish == "length" else "completed"


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call_id: str, name: str, arguments: str, status: str) -> Item:
    fields = {"call_id": call_id, "name": name, "arguments": arguments, "status": status}
    return {"id": f"fc_{call_id}", "type": "function_call", **fields}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
