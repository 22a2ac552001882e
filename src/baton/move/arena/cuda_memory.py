"""An arena in device memory, for transports and tiers: copies through page-locked host memory on separate streams.

The device copies page-locked memory by DMA while kernels run. Other memory is first copied to page-locked pages.
Source: CUDA Driver API, sections "Memory Management" (cuMemHostAlloc, cuMemcpyDtoHAsync) and "Stream Management".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

import numpy as np

from baton.core.errors import ArenaError, TransferError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaPart
from baton.move.transport.device_memory import DeviceMoves, Location

_PORTABLE = c_uint(1)  # CU_MEMHOSTALLOC_PORTABLE: locked for every context of the process
_NON_BLOCKING = c_uint(1)  # CU_STREAM_NON_BLOCKING: waits for nothing on the default stream


class CudaMemory:
    """Implements `DeviceMemory` over the parts of an arena. A block appears as the sequence of its ranks' parts."""

    def __init__(self, parts: Sequence[CudaPart], layout: KVLayout) -> None:
        self.nbytes = sum(part.array.bytes_total for part in parts)
        self.location = _location(parts)
        self._parts = parts
        self._layout = layout

    def buffer(self, size_bytes: int) -> CudaBuffer:
        return CudaBuffer(self._parts, self._layout, size_bytes)


def _location(parts: Sequence[CudaPart]) -> Location | None:
    """Return the location of the memory, or None if the ranks' parts lie on different devices."""
    if len(parts) > 1:
        return None
    array = parts[0].array
    return Location("VRAM", array.address, int(array.device.removeprefix("cuda:")))


class CudaBuffer:
    """Implements `CopyBuffer`: page-locked memory, and one stream per device."""

    def __init__(self, parts: Sequence[CudaPart], layout: KVLayout, size_bytes: int) -> None:
        self._layout = layout
        self._first = parts[0].driver
        self._streams: list[_Stream] = []
        with _as_transfer():
            host = c_void_p()
            self._first.call("cuMemHostAlloc", byref(host), c_size_t(size_bytes), _PORTABLE)
        self._address = host.value or 0
        self.memory = memoryview((c_ubyte * size_bytes).from_address(self._address)).cast("B")
        try:
            for part in parts:
                self._streams.append(_Stream(part))
        except TransferError:
            self.close()
            raise

    def copy_out(self, moves: DeviceMoves) -> None:
        self._copy("cuMemcpyDtoHAsync_v2", moves)

    def copy_in(self, moves: DeviceMoves) -> None:
        self._copy("cuMemcpyHtoDAsync_v2", moves)

    def wait(self) -> None:
        """Wait for every device, even if one fails, so that no copy is left under way."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.callback(stream.wait)

    def close(self) -> None:
        with ExitStack() as stack:  # runs all callbacks in reverse order, even if one fails
            stack.callback(self._free)
            for stream in self._streams:
                stack.callback(stream.close)
            stack.callback(self.memory.release)

    def _free(self) -> None:
        with _as_transfer():
            self._first.call("cuMemFreeHost", c_void_p(self._address))

    def _copy(self, function: str, moves: DeviceMoves) -> None:
        for rank, own in enumerate(by_rank(moves, self._layout)):
            if len(own):
                self._streams[rank].copy(function, np.add(own, (0, self._address, 0)))


class _Stream:
    """A CUDA stream for copies from and to one device."""

    def __init__(self, part: CudaPart) -> None:
        self._driver, self._address = part.driver, part.array.address
        self._handle = c_void_p()
        with _as_transfer():
            self._driver.call("cuStreamCreate", byref(self._handle), _NON_BLOCKING)

    def copy(self, function: str, moves: DeviceMoves) -> None:
        """Begin copies. A row of `moves` has the offset in the part, the address in host memory, and the size."""
        to_device = function.startswith("cuMemcpyHtoD")
        with _as_transfer():
            for offset, address, size in moves.tolist():
                device, host = c_uint64(self._address + offset), c_void_p(address)
                ends = (device, host) if to_device else (host, device)
                self._driver.call(function, *ends, c_size_t(size), self._handle)

    def wait(self) -> None:
        with _as_transfer():
            self._driver.call("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        with _as_transfer():
            self._driver.call("cuStreamDestroy_v2", self._handle)


def by_rank(moves: DeviceMoves, layout: KVLayout) -> list[DeviceMoves]:
    """Cut moves at the borders of the ranks' parts. Return those of each rank, with offsets in the rank's own part."""
    if layout.ranks == 1:
        return [moves]
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.ranks)]
    for offset, at, size in moves.tolist():
        end = offset + size
        for block in range(offset // layout.block_bytes, -(-end // layout.block_bytes)):
            for own, shard in zip(found, layout.shards, strict=True):
                begin = block * layout.block_bytes + shard.offset_bytes
                first, last = max(offset, begin), min(end, begin + shard.size_bytes)
                if first < last:
                    own.append((block * shard.size_bytes + first - begin, at + first - offset, last - first))
    return [np.array(own, np.int64).reshape(-1, 3) for own in found]


@contextmanager
def _as_transfer() -> Iterator[None]:
    try:
        yield
    except ArenaError as error:
        raise TransferError(f"the GPU does not copy KV: {error}; see nvidia-smi and the kernel's log") from error
