"""The only place in the server that reads a clock."""

from __future__ import annotations

import time


def now_s() -> float:
    """Monotonic seconds, one time line for all processes of a host."""
    return time.monotonic()  # noqa: TID251


def unix_s() -> int:
    """Seconds since 1970, for `created` fields."""
    return int(time.time())  # noqa: TID251
