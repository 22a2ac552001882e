"""A memory file with the packed weights of a model, which the workers of a host share.

The first worker fills the file and seals it; every other one maps it read-only. The seal marks the file as complete and
refuses later writes, so a worker that is killed in between leaves an unsealed file, which the next one fills again.
A memory file has no name and uses no space in /dev/shm. The host holds its descriptor, so it outlives each worker.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

SEAL_FUTURE_WRITE = 0x10
"""Refuses writes, and further mappings for writing. Linux 5.1; `fcntl` of Python 3.12 does not have its number."""


def can_share_weights() -> bool:
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_GET_SEALS")


def create_weights_file() -> int | None:
    """Create an empty file for the workers of a host. Return its descriptor, or None if this system has none."""
    if not can_share_weights():
        return None
    try:
        return os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None  # a sandbox may forbid it: then every worker has its own copy


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A worker's access to the file."""

    descriptor: int

    @contextmanager
    def locked(self) -> Generator[None]:
        """Wait until no other process fills the file. The kernel ends the lock of a process that dies."""
        # Not `flock`: that lock belongs to the open file, which all workers inherit.
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    @property
    def is_complete(self) -> bool:
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & SEAL_FUTURE_WRITE)

    def clear(self) -> None:
        """Discard the contents that a worker left when it died while filling the file."""
        os.ftruncate(self.descriptor, 0)
