"""The only place in the load generator that reads a clock."""

from __future__ import annotations

import time


def now_s() -> float:
    """Monotonic seconds."""
    return time.monotonic()  # noqa: TID251
