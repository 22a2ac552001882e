"""The only module that reads the clocks of the operating system.

Decisions and durations use `now_s`. The wall clock may jump, so it gives only dates that are shown.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now_s() -> float:
    """Return monotonic seconds, comparable between all processes of one machine."""
    return time.monotonic()  # noqa: TID251


def unix_s() -> int:
    """Return seconds since 1970, for timestamps in responses."""
    return int(time.time())  # noqa: TID251


def utc_date() -> datetime:
    """Return the date and time in UTC, for files and prompts that show it."""
    return datetime.now(UTC)  # noqa: TID251
