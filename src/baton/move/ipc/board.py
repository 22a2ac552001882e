"""Facts that processes of one machine look up for themselves, in memory that their owner lends for reading.

A look wakes nobody. What it finds stood there at one moment between its begin and its end; what it does not find may be
true all the same: then the owner is asked.
"""

from __future__ import annotations

import mmap
import os
import platform

from baton.move.ipc.lending import sealed_file

ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Others see what a processor writes in the order in which it writes it. Elsewhere nothing is ever found."""

_MARK_BYTES = 8
_NO_MARK = bytes(_MARK_BYTES)


class Board:
    """Rows of one size, each in the place of its number. Calls that change it must not overlap: its owner locks."""

    def __init__(self, name: str, *, rows: int, row_bytes: int) -> None:
        """Rows take memory when they are first written. Raises OSError where there is none."""
        file = sealed_file(name, rows * row_bytes)
        try:
            self._mapping = mmap.mmap(file, rows * row_bytes)
            self.descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
            """To lend: whoever has it can only read."""
        finally:
            os.close(file)
        self._rows = rows
        self._row_bytes = row_bytes

    def post(self, number: int, row: bytes) -> None:
        """Write a row where `number` belongs, over what stood there. Its first eight bytes tell it from others."""
        start = number % self._rows * self._row_bytes
        body = start + _MARK_BYTES
        self._mapping[start:body] = _NO_MARK
        self._mapping[body : start + self._row_bytes] = row[_MARK_BYTES:]
        self._mapping[start:body] = row[:_MARK_BYTES]

    def row(self, number: int) -> bytes:
        """What stands where `number` belongs."""
        start = number % self._rows * self._row_bytes
        return self._mapping[start : start + self._row_bytes]

    def clear(self, number: int, beginning: bytes) -> None:
        """Take a row away, if the one that stands there begins so. Nobody finds it after that."""
        start = number % self._rows * self._row_bytes
        if self._mapping[start : start + len(beginning)] == beginning:
            self._mapping[start : start + _MARK_BYTES] = _NO_MARK

    def close(self) -> None:
        """Let go of the memory. Whoever has it mapped goes on finding what was not cleared before."""
        self._mapping.close()
        os.close(self.descriptor)


class PostedRows:
    """The same rows, seen by another process."""

    def __init__(self, memory: memoryview, row_bytes: int) -> None:
        """Raises ValueError where there is no room for a row: whoever lends that is none of ours."""
        if len(memory) < row_bytes:
            raise ValueError(f"a board of {len(memory)} bytes has no row of {row_bytes}")
        self._memory = memory
        self._rows = len(memory) // row_bytes
        self._row_bytes = row_bytes

    def row(self, number: int) -> bytes | None:
        """What stands where `number` belongs: of this number or of another one. None: it is being written."""
        start = number % self._rows * self._row_bytes
        first, again = (bytes(self._memory[start : start + self._row_bytes]) for _ in range(2))
        return first if ORDERED and first == again else None
