"""Checks of refusals: OpenAI's error body, and the limit with the setting that raises it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

LIMITED = frozenset({408, 413, 429, 431, 507})
"""Statuses of refusals for a limit."""
_BOUND = re.compile(r"\d.*(\b(limits|http|sandbox|policy|batches)\.\w+|at this path)", re.DOTALL)


def check_refusal(status: int, body: bytes) -> None:
    """A refusal has OpenAI's body, and one for a limit names the limit and its setting."""
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert status not in LIMITED or _BOUND.search(error["message"]), error["message"]


def statuses(answers: Iterable[bytes]) -> Counter[str]:
    """Count the statuses of raw responses, and check the refusals. Empty: the server closed without a response."""
    found: Counter[str] = Counter()
    for answer in answers:
        status = answer[9:12].decode()
        found[status] += 1
        if status >= "400":
            check_refusal(int(status), answer.partition(b"\r\n\r\n")[2])
    return found
