"""Headers of error responses."""

from __future__ import annotations

import pytest

from baton.core.errors import RequestError
from baton.serve.http.wire.errors import ClusterError, error_headers


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RequestError("the sandbox was lost", status=503), "1"),
        (ClusterError("too many wait", status=503, code="queue_deadline", retry_after_s=2.5), "3"),
        (RequestError("the prompt is too long"), None),
    ],
)
def test_every_503_says_when_to_try_again(error: RequestError, seconds: str | None) -> None:
    assert error_headers(error).get("retry-after") == seconds
