"""The only module that reads the clocks of the operating system."""

from __future__ import annotations

import time


def now_s() -> float:
    """Return monotonic seconds, comparable between all processes of one machine."""
    return time.monotonic()  # noqa: TID251


def unix_s() -> int:
    """Return seconds since 1970, for timestamps in responses."""
    return int(time.time())  # noqa: TID251
