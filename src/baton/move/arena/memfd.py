"""A host's arena: anonymous shared memory that every worker of the host maps.

A memfd has no name, so that nothing is left when processes die. It is sealed, so that it cannot shrink while a process
reads it. Its descriptor is sent over a Unix socket. `multiprocessing.shared_memory` is no alternative: its tracker
unlinks segments when an unrelated reader exits. Source: references/transports.md, sections 9 and 10.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from dataclasses import dataclass

from baton.core.errors import ArenaError

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SEAL") else 0
_PREFAULT_BYTES = 4 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_BYTES = 2 * 1024 * 1024
"""A large page of the system."""
_MAP_FIXED = 0x10


@dataclass(slots=True)
class Arena:
    """One mapping of the arena. The process that created it and every worker each have their own."""

    fd: int
    bytes_total: int
    _map: mmap.mmap

    @property
    def memory(self) -> memoryview:
        """The arena's bytes, shared with every process that maps it."""
        return memoryview(self._map)

    @property
    def untouched_bytes(self) -> int:
        """Part of the arena whose pages take no memory yet."""
        return max(0, self.bytes_total - os.fstat(self.fd).st_blocks * 512)

    def prefault(self, start: int) -> int:
        """Reserve the next pages, so that no step pays for their first use. Return the position for the next call.

        Safe while workers write, because the kernel maps pages without changing bytes. If the kernel does not support
        it, return the end. Raises ArenaError if the system has no memory for them: a process that uses one of these
        pages would be killed by SIGBUS.
        """
        size = min(_PREFAULT_BYTES, self.bytes_total - start)
        if size <= 0:
            return self.bytes_total
        if _SEALS:  # Linux
            _collapse(self.fd, start, size)
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError as error:
            if error.errno not in (errno.EFAULT, errno.ENOMEM):
                return self.bytes_total
            raise ArenaError(
                f"the KV cache takes {self.bytes_total / 2**30:.2f} GiB, but the system has no memory beyond the first"
                f" {start / 2**30:.2f} ({error.strerror}); set kv.bytes or --kv-blocks to less"
            ) from error
        return start + size

    def close(self) -> None:
        """Unmap. The memory is freed when the last process has unmapped it. There must be no views of it."""
        self._map.close()
        os.close(self.fd)


def create_arena(bytes_total: int) -> Arena:
    """Reserve shared memory for a host's KV cache. Raises ArenaError if the host has not enough."""
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, bytes_total)
        mapping = mmap.mmap(fd, bytes_total, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise ArenaError(
            f"the host refuses {bytes_total / 2**30:.2f} GiB of shared memory for the KV cache: {error};"
            " set kv.bytes or --kv-blocks to less"
        ) from error
    if _SEALS and hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return Arena(fd, bytes_total, mapping)


def open_arena(fd: int, bytes_total: int) -> Arena:
    """Map an arena by its received descriptor. Takes over the descriptor. Raises ArenaError if its size differs."""
    held = os.fstat(fd).st_size
    if held != bytes_total:
        raise ArenaError(
            f"the arena's descriptor holds {held} bytes, but {bytes_total} were announced; restart the server"
        )
    return Arena(fd, bytes_total, mmap.mmap(fd, bytes_total, flags=mmap.MAP_SHARED))


def _collapse(fd: int, start: int, size: int) -> None:
    """Put a part of the arena into large pages: steps over long contexts are then about 10 % faster.

    Pages belong to the file, so all mappings gain. The call needs an aligned mapping: a temporary one. If the kernel
    cannot do it, or has too little contiguous memory, small pages stay. start: a multiple of a large page.
    """
    size -= size % _HUGE_BYTES
    if size == 0:
        return
    reserved = mmap.mmap(-1, size + _HUGE_BYTES)  # unmapping it unmaps the file inside, too
    place = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    place += -place % _HUGE_BYTES
    system = ctypes.CDLL(None)
    system.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    system.mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, start)
    for at in range(place, place + size, _HUGE_BYTES):
        if system.madvise(at, mmap.PAGESIZE, _MADV_POPULATE_WRITE) == 0:  # the kernel refuses to collapse a hole
            system.madvise(at, _HUGE_BYTES, _MADV_COLLAPSE)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("baton-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix="baton-arena") as file:  # this system has no memfd: use an unnamed file
        return os.dup(file.fileno())
