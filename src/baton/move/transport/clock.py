"""The only place in transports that reads a clock: leases end by it."""

from __future__ import annotations

import time


def now_s() -> float:
    """Monotonic seconds."""
    return time.monotonic()  # noqa: TID251
