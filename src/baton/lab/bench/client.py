"""Send one request and read its answer. A failed request raises no error: its `Reply` holds the reason."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urljoin

import aiohttp

from baton.lab.bench.wire import CountedBy, StreamedAnswer, error_text
from baton.lab.report.summary import RequestRecord
from baton.lab.workload.request import TraceRequest
from baton.move.clock import now_s

KEEP_ALIVE_S = 2.0
"""Idle connections are closed after this time: the server closes them after 5 s (uvicorn), failing a request."""
_ERROR_BYTES_MAX = 64 * 1024
_REJECTIONS = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of one request."""

    index: int
    record: RequestRecord
    reason: str
    """Reason why the request did not finish; empty if it did."""
    counted_by: CountedBy
    """Source of the number of output tokens."""
    asked_tokens: int
    late_s: float
    """Time from the due time to sending. 0 without a due time."""
    text: str = ""
    """Text of the answer, if requested."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Reason why there is no complete answer."""

    outcome: Literal["rejected", "failed"]
    reason: str


@dataclass(frozen=True, slots=True)
class Response:
    """Status and body of a response that is not a stream."""

    status: int
    body: bytes


class Client:
    """HTTP to one server. Use as an async context manager."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._base_url = base_url
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def get(self, path: str) -> Response:
        """Get a path below the API. Raises aiohttp.ClientError, TimeoutError or OSError if there is no answer."""
        async with self._http.get(self._base_url + path) as response:
            return Response(response.status, await response.read())

    async def get_at_root(self, path: str) -> Response:
        """Get a path below the host. Raises like `get`."""
        async with self._http.get(urljoin(self._base_url, path)) as response:
            return Response(response.status, await response.read())

    async def post(self, path: str, body: bytes) -> Response:
        """Post to a path below the API. Raises like `get`."""
        async with self._http.post(self._base_url + path, data=body) as response:
            return Response(response.status, await response.read())

    async def ask(
        self,
        path: str,
        body: bytes,
        *,
        request: TraceRequest,
        index: int,
        due_s: float | None = None,
        keep_text: bool = False,
    ) -> Reply:
        """Send a streaming request and read its answer to the end. TTFT counts from this call."""
        answer = StreamedAnswer(text=[] if keep_text else None)
        sent_s = now_s()
        try:
            refusal = await self._read(path, body, index, answer)
        except TimeoutError:
            refusal = RequestFailure("failed", f"no complete answer within {self._timeout.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            refusal = RequestFailure("failed", f"cut off: {type(error).__name__}: {error}")
        if refusal is not None and refusal.outcome == "rejected":
            outcome, reason = refusal.outcome, refusal.reason
        else:
            outcome, reason = answer.verdict(refusal.reason if refusal is not None else "")
        return Reply(
            index=index,
            record=RequestRecord(
                arrival_s=sent_s,
                end_s=now_s(),
                outcome=outcome,
                input_tokens=_prompt_tokens(answer, request),
                token_times_s=answer.token_times_s(),
                cached_tokens=_cached_tokens(answer),
                slo=request.slo,
                tenant=request.tenant,
            ),
            reason=reason,
            counted_by=answer.counted_by,
            asked_tokens=request.output_tokens,
            late_s=0.0 if due_s is None else max(0.0, sent_s - due_s),
            text="".join(answer.text or ()),
        )

    async def _read(self, path: str, body: bytes, index: int, answer: StreamedAnswer) -> RequestFailure | None:
        """Fill `answer` from the socket. Return a failure if the server does not begin a stream."""
        headers = {"X-Request-Id": f"bench-{index}"}
        async with self._http.post(self._base_url + path, data=body, headers=headers) as response:
            if response.status != 200:
                detail = error_text(await response.content.read(_ERROR_BYTES_MAX))
                outcome = "rejected" if response.status in _REJECTIONS else "failed"
                return RequestFailure(outcome, f"HTTP {response.status}: {detail}")
            if response.content_type != "text/event-stream":
                return RequestFailure("failed", f"not a stream: the answer's Content-Type is {response.content_type}")
            async for data in response.content.iter_any():
                answer.feed(data, now_s())
        return None


def _prompt_tokens(answer: StreamedAnswer, request: TraceRequest) -> int:
    """Return the number of prompt tokens that the server counted, or the trace's number if the server does not tell."""
    counted = answer.usage.prompt_tokens if answer.usage is not None else None
    return counted or request.input_tokens


def _cached_tokens(answer: StreamedAnswer) -> int | None:
    details = answer.usage.prompt_tokens_details if answer.usage is not None else None
    return details.cached_tokens if details is not None else None
