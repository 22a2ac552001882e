"""One HTTP request that passes through the proxy: its messages in, the answers to the proxy out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.core.errors import RequestError
from baton.core.types import HostId
from baton.integrations import protobuf
from baton.integrations.gateway.asked import read_request, without_topology
from baton.integrations.gateway.messages import (
    FULL_DUPLEX_STREAMED,
    OVERWRITE,
    HttpBody,
    HttpHeaders,
    JsonValue,
    ProcessingRequest,
)
from baton.integrations.gateway.picker import Pick, Picker
from baton.integrations.grpc.http2 import INVALID_ARGUMENT, Stream
from baton.move.clock import now_s
from baton.serve.http.wire.errors import ClusterError, error_body, error_headers

DESTINATION = "x-gateway-destination-endpoint"
_SERVED = "x-gateway-destination-endpoint-served"
PREFILLER = "x-prefiller-host-port"
_METADATA = "envoy.lb"
_SUBSET_METADATA, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_TOPOLOGY_HEADERS = (PREFILLER, "x-kv-cache-source-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port")
"""Headers that steer connections between engines. Those of clients are removed."""
BODY_BYTES_MAX = 32 * 1024 * 1024
BODIES_BYTES_MAX = 512 * 1024 * 1024
"""Maximum size of the bodies of all requests that a picker holds (INV-9)."""
_CHUNK_BYTES = 62_000
"""Maximum size of a chunk of a request's body on its way back to the proxy, which limits its own buffers to 64 KiB."""
_KNOWN_MAX = 4096
"""Answers that are kept encoded."""
_CHUNK_PATHS = {"request_body": (3, 1, 3, 3), "response_body": (4, 1, 3, 3)}
"""Numbers of the fields of an answer around a chunk (`body`, 1, and `end_of_stream`, 2), in `messages.py`."""
_BUFFERED = 2
_BODY_MODES = (0, _BUFFERED, FULL_DUPLEX_STREAMED)
"""Modes of the request's body that the picker can work with: none, the whole body, and all chunks."""
_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')


class Replies:
    """Makes the messages to the proxy. Those without content are made once."""

    def __init__(self, messages: Mapping[str, Any]) -> None:
        """`messages`: the class of each message by its name."""
        self._made = messages["ProcessingResponse"]
        self.parse = messages["ProcessingRequest"].FromString
        names = ("request_headers", "response_headers", "request_body", "response_body")
        self.go_on: dict[str, bytes] = {name: self._bytes(name, {"response": {}}) for name in names}
        """Continue without a change, in reply to a message of this name."""
        for name in ("request_trailers", "response_trailers"):
            self.go_on[name] = self._bytes(name, {})
        mutation = {"header_mutation": {"remove_headers": _TOPOLOGY_HEADERS}}
        self.strip_headers = self._bytes("request_headers", {"response": mutation})
        self._known: dict[tuple[str, str, str], bytes] = {}
        """Answers without a body, by what they name."""

    def _bytes(self, name: str, content: Mapping[str, Any]) -> bytes:
        return self._made(**{name: content}).SerializeToString()

    def picked(self, name: str, addresses: str, prefiller: str, body: bytes | None = None) -> bytes:
        """Tell the proxy the picked servers, in reply to a message of this name. `body`: replaces the request's."""
        asked = (name, addresses, prefiller)
        if body is None and (known := self._known.get(asked)) is not None:
            return known
        sets = [_header(DESTINATION, addresses), *([_header(PREFILLER, prefiller)] if prefiller else [])]
        removed = _TOPOLOGY_HEADERS[1:] if prefiller else _TOPOLOGY_HEADERS
        response: dict[str, Any] = {"header_mutation": {"set_headers": sets, "remove_headers": removed}}
        if body is not None:
            response["body_mutation"] = {"body": body}
        made = self._made(**{name: {"response": response}})
        made.dynamic_metadata.fields[_METADATA].struct_value.fields[DESTINATION].string_value = addresses
        encoded: bytes = made.SerializeToString()
        if body is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[asked] = encoded
        return encoded

    def chunk(self, name: str, body: bytes, *, is_last: bool) -> bytes:
        """Pass on a chunk of a body. Encoded here: every chunk of every answer is one such message."""
        return protobuf.nested(_CHUNK_PATHS[name], protobuf.nested((1,), body) + (b"\x10\x01" if is_last else b""))

    def refused(self, error: RequestError) -> bytes:
        """Answer the client instead of a server."""
        headers = {"content-type": "application/json", **error_headers(error)}
        sets = [_header(name, value) for name, value in headers.items()]
        refusal = {"status": {"code": error.status}, "headers": {"set_headers": sets}, "body": error_body(error)}
        return self._bytes("immediate_response", {**refusal, "details": error.code or "refused"})


def _header(name: str, value: str) -> dict[str, Any]:
    return {"header": {"key": name, "raw_value": value.encode()}, "append_action": OVERWRITE}


class BodyMemory:
    """The memory that the bodies of all requests take. Other requests are refused while it is full."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0

    def take(self, size: int) -> None:
        """Reserve memory for a part of a body. Raises ClusterError (503) if there is not enough."""
        if self._held_bytes + size > self._bytes_max:
            reason = f"request bodies take {self._held_bytes} bytes of the endpoint picker's memory, at most"
            reason += f" {self._bytes_max} may be; send the request again later"
            raise ClusterError(reason, status=503, code="body_memory_full", retry_after_s=1.0)
        self._held_bytes += size

    def give(self, size: int) -> None:
        """Release reserved memory."""
        self._held_bytes -= size


class Exchange:
    """The state of one request. Implements `Call`."""

    def __init__(self, number: int, picker: Picker, replies: Replies, memory: BodyMemory, stream: Stream) -> None:
        """`number`: unique among the requests of the picker."""
        self._number = number
        self._picker = picker
        self._replies = replies
        self._memory = memory
        self._stream = stream
        self._headers: dict[bytes, bytes] = {}
        self._hosts: tuple[HostId, ...] | None = None
        """The only servers that the proxy allows. None: all of the pool."""
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._held_bytes = 0
        """Size of the body's chunks so far. They are in memory until the answer begins."""
        self._is_refused = False
        self._received = bytearray()
        """The request's body, until its last chunk comes."""
        self._body = b""
        """The whole body as the server gets it, until it is sent. Bodies are large: it is not copied on the way."""
        self._is_body_changed = False
        self._pick: Pick | None = None
        self._is_text_stream = False
        self._events = 0
        self._output_tokens = 0
        self._status = 0
        self._is_complete = False

    def handle(self, message: bytes) -> None:
        """Answer a message of the proxy."""
        asked = self._replies.parse(message)
        if asked.HasField("response_body"):
            self._response_body(asked.response_body)
        elif asked.HasField("request_body"):
            self._request_body(asked.request_body)
        elif asked.HasField("request_headers"):
            self._request_headers(asked)
        elif asked.HasField("response_headers"):
            self._response_headers(asked)
        elif asked.HasField("request_trailers"):
            self._decide(self._take_received(), has_trailers=True)
        else:
            self._is_complete = True
            self._stream.send(self._replies.go_on["response_trailers"])

    def finish(self) -> None:
        self._stream.end()

    def close(self) -> None:
        """Note the end of the stream. Without the end of the answer, the client or the server has ended it."""
        self._release()
        if self._pick is not None:
            tokens = self._output_tokens or max(0, self._events - 1)
            is_complete = self._is_complete and self._status < 500
            self._picker.end(self._pick, output_tokens=tokens, is_complete=is_complete)

    # ---- the request

    def _request_headers(self, message: ProcessingRequest) -> None:
        headers, hints = message.request_headers, message.metadata_context.filter_metadata
        self._headers = _read_headers(headers)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if _SUBSET_METADATA in hints and _SUBSET in hints[_SUBSET_METADATA].fields:
            self._hosts = _read_subset(hints[_SUBSET_METADATA].fields[_SUBSET])
        if self._request_mode not in _BODY_MODES:
            reason = "request_body_mode of Envoy's ext_proc filter must be FULL_DUPLEX_STREAMED or BUFFERED"
            self._stream.send(self._replies.refused(RequestError(reason, status=500, code="proxy_configuration")))
        elif headers.end_of_stream or not self._request_mode:
            self._decide()
        elif self._request_mode == _BUFFERED:
            self._stream.send(self._replies.strip_headers)

    def _request_body(self, chunk: HttpBody) -> None:
        if self._is_refused:
            return  # the proxy has not stopped yet
        try:
            self._take(len(chunk.body))
        except RequestError as error:
            self._is_refused = True
            self._received.clear()
            self._stream.send(self._replies.refused(error))
            return
        if not chunk.end_of_stream:
            self._received += chunk.body
        elif not self._received:
            self._decide(chunk.body, has_body=True)
        else:
            self._received += chunk.body
            self._decide(self._take_received(), has_body=True)

    def _take(self, size: int) -> None:
        """Reserve memory for a chunk. Raises RequestError (413: the body is too large, 503: all bodies are)."""
        if self._held_bytes + size > BODY_BYTES_MAX:
            reason = f"the body is larger than {BODY_BYTES_MAX} bytes, which the endpoint picker takes; send less"
            raise RequestError(reason, status=413)
        self._memory.take(size)
        self._held_bytes += size

    def _release(self) -> None:
        self._memory.give(self._held_bytes)
        self._held_bytes = 0

    def _take_received(self) -> bytes:
        body, self._received = bytes(self._received), bytearray()
        return body

    def _decide(self, body: bytes = b"", *, has_body: bool = False, has_trailers: bool = False) -> None:
        """Choose servers. Send the messages with their addresses and the body, or with a refusal, once it is known."""
        if self._pick is not None:
            self._stream.end(INVALID_ARGUMENT, "the request has ended twice")
            return
        try:
            if self._hosts == ():
                raise ClusterError("the proxy allows no server", status=503, code="no_worker", retry_after_s=1.0)
            request = read_request(self._number, self._headers, body, self._hosts or (), now_s())
            self._body = without_topology(body)
        except RequestError as error:
            self._stream.send(self._replies.refused(error))
            return
        self._is_body_changed = self._body is not body
        pick = self._pick = self._picker.arrive(request)
        pick.when_decided(lambda: self._answer(pick, has_body=has_body, has_trailers=has_trailers))

    def _answer(self, pick: Pick, *, has_body: bool, has_trailers: bool) -> None:
        if pick.refusal is not None:
            self._stream.send(self._replies.refused(pick.refusal))
            return
        addresses = ",".join(self._picker.addresses(pick))
        for reply in self._picked(addresses, self._picker.prefiller(pick), has_body=has_body):
            self._stream.send(reply)
        if has_trailers:
            self._stream.send(self._replies.go_on["request_trailers"])

    def _picked(self, addresses: str, prefiller: str, *, has_body: bool) -> list[bytes]:
        replies, body, self._body = self._replies, self._body, b""
        if has_body and self._request_mode == _BUFFERED:
            return [replies.picked("request_body", addresses, prefiller, body if self._is_body_changed else None)]
        ends = range(_CHUNK_BYTES, len(body) + _CHUNK_BYTES, _CHUNK_BYTES) or ([0] if has_body else [])
        sent = [
            replies.chunk("request_body", body[max(0, end - _CHUNK_BYTES) : end], is_last=has_body and end >= len(body))
            for end in ends
        ]
        return [replies.picked("request_headers", addresses, prefiller), *sent]

    # ---- the answer

    def _response_headers(self, message: ProcessingRequest) -> None:
        self._release()
        headers = message.response_headers
        found = _read_headers(headers)
        if self._pick is not None:
            self._picker.note_served(self._pick, _text(message, _METADATA, _SERVED))
        status = found.get(b":status", b"")
        self._status = int(status) if status.isdigit() else 0
        self._is_text_stream = found.get(b"content-type", b"").startswith(b"text/event-stream")
        if headers.end_of_stream or not self._response_mode:
            self._begin()
            self._is_complete = bool(headers.end_of_stream)
        self._stream.send(self._replies.go_on["response_headers"])

    def _response_body(self, chunk: HttpBody) -> None:
        body, is_last = chunk.body, chunk.end_of_stream
        self._begin()
        self._events += body.count(b"data:") if self._is_text_stream else 0
        if (found := _TOKENS.search(body)) is not None:
            self._output_tokens = int(found[1])
        self._is_complete = self._is_complete or is_last
        if self._response_mode != FULL_DUPLEX_STREAMED:
            self._stream.send(self._replies.go_on["response_body"])
        else:
            self._stream.send(self._replies.chunk("response_body", body, is_last=is_last))

    def _begin(self) -> None:
        if self._pick is not None and self._pick.refusal is None:
            is_first_token = self._is_text_stream and self._status == 200
            self._picker.begin(self._pick, is_first_token=is_first_token)


def _read_headers(headers: HttpHeaders) -> dict[bytes, bytes]:
    return {each.key.encode(): each.raw_value or each.value.encode() for each in headers.headers.headers}


def _text(message: ProcessingRequest, namespace: str, key: str) -> str:
    """Return a text in the metadata of a message. Empty: it has none."""
    metadata = message.metadata_context.filter_metadata
    is_there = namespace in metadata and key in metadata[namespace].fields
    return metadata[namespace].fields[key].string_value if is_there else ""


def _read_subset(value: JsonValue) -> tuple[HostId, ...]:
    """Return the servers of a hint: a list of addresses, or a text with commas between them."""
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return tuple(HostId(text.strip()) for text in texts if text.strip())
