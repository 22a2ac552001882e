"""OpenAI's error body, and the HTTP status of each failure."""

from __future__ import annotations

import math

from msgspec import UNSET, Struct, UnsetType, json

from baton.core.errors import RequestError
from baton.core.messages import RejectReason
from baton.core.types import GRAMMAR_FAILED
from baton.serve.live.live_request import Finish

REJECT_STATUS: dict[RejectReason, int] = {
    "queue_full": 503,
    "queue_deadline": 503,
    "no_worker": 503,
    "too_long": 400,
    "slo": 503,
    "share": 429,
    "shutdown": 503,
    "retries": 503,
}
_REJECT_CODE: dict[RejectReason, str] = {"too_long": "context_length_exceeded", "share": "rate_limit_exceeded"}
_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
MESSAGES_PATH = "/v1/messages"
"""Path of Anthropic's Messages API, and beginning of the paths of its other routes."""
RETRY_AFTER_S = 1.0
"""Seconds in Retry-After if the cluster has no estimate of its own."""


class ErrorInfo(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None
    resume_id: str | UnsetType = UNSET
    """Id with which the client can resume its stream after a restart of the server."""


class ErrorBody(Struct, frozen=True):
    error: ErrorInfo


class ClusterError(RequestError):
    """The cluster rejected the request or could not finish it. `retry_after_s` is sent as the header Retry-After."""

    def __init__(
        self, message: str, *, status: int, code: str, retry_after_s: float | None = None, resume_id: str = ""
    ) -> None:
        """`resume_id`: id of the saved stream. Empty: the stream was not saved."""
        super().__init__(message, status=status, code=code)
        self.retry_after_s = retry_after_s
        self.resume_id = resume_id


def finish_error(finish: Finish) -> ClusterError:
    """Return the error for the client of a request that did not finish."""
    if finish.outcome == "rejected" and finish.reject is not None:
        status = REJECT_STATUS[finish.reject]
        code = _REJECT_CODE.get(finish.reject, finish.reject)
        wait_s = None if status == 400 else (finish.retry_after_s or RETRY_AFTER_S)
        return ClusterError(finish.message, status=status, code=code, retry_after_s=wait_s)
    if finish.outcome == "cancelled" and finish.is_final:
        message = "an operator of the server cancelled the request (POST /cluster/cancel)"
        return ClusterError(message, status=410, code="cancelled_by_operator")
    if finish.outcome == "cancelled":
        message = finish.message or "the server cancelled the request; send it again"
        return ClusterError(message, status=503, code="cancelled", retry_after_s=RETRY_AFTER_S)
    if finish.message.startswith(GRAMMAR_FAILED):
        return ClusterError(finish.message, status=400, code="invalid_grammar")
    return ClusterError(finish.message or "the generation failed; send it again", status=500, code="generation_failed")


def error_body(error: RequestError, path: str = "") -> bytes:
    """Return an error as OpenAI's JSON body, or as Anthropic's if `path` is one of its API."""
    kind = "server_error" if error.status == 500 else _TYPE.get(error.status, "invalid_request_error")
    resume_id = error.resume_id if isinstance(error, ClusterError) else ""
    body = json.encode(ErrorBody(ErrorInfo(str(error), kind, error.param, error.code, resume_id or UNSET)))
    return anthropic_error(body) if path.startswith(MESSAGES_PATH) else body


def anthropic_error(body: bytes) -> bytes:
    """Return OpenAI's error body with the field that makes it one of Anthropic's."""
    return b'{"type":"error",' + body[1:]


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers that the error's status needs: Retry-After (whole seconds, at least 1) or WWW-Authenticate."""
    headers: dict[str, str] = {}
    default_s = RETRY_AFTER_S if error.status == 503 else None  # a 503 of a sandbox has no time of its own
    retry_after_s = error.retry_after_s if isinstance(error, ClusterError) else default_s
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
