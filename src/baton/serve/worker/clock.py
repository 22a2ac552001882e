"""The only place in a worker that reads a clock."""

from __future__ import annotations

import time


def now_s() -> float:
    """Monotonic seconds, one time line for all processes of a host."""
    return time.monotonic()  # noqa: TID251
