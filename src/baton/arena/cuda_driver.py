"""The few calls of NVIDIA's driver that an arena needs, without PyTorch: the server must not load it.

Source: CUDA Driver API, sections "Memory Management" and "Peer Context Memory Access", libcuda.so.1.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from baton.core.errors import ArenaError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_PEER_ACCESS = c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only value there is


class CudaUnavailableError(ArenaError):
    """There is no usable GPU here. The message says what is missing."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The driver, with one device's primary context current in this thread: the context that PyTorch uses too."""

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        """Raises CudaUnavailableError where there is no driver, or no such device."""
        self._dll = _load(library)
        count = c_int()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGetCount", byref(count))
        if not 0 <= device < count.value:
            raise CudaUnavailableError(
                f"there is no device cuda:{device}: the driver sees {count.value} of them; "
                "name one of those, or look at CUDA_VISIBLE_DEVICES"
            )
        handle, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(handle), c_int(device))
        self._call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def allocate(self, size_bytes: int) -> int:
        """Reserve device memory. Returns its address. Raises ArenaError where the device has less."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` reserved."""
        self._call("cuMemFree_v2", c_uint64(address))

    def export(self, address: int) -> bytes:
        """Return what another process opens an allocation with."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.reserved)

    def open(self, exported: bytes) -> int:
        """Map another process's allocation. Returns its address here."""
        address, handle = c_uint64(), _Handle.from_buffer_copy(exported)
        self._call("cuIpcOpenMemHandle_v2", byref(address), handle, _PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap what `open` mapped."""
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        code = self._dll[name](*arguments)
        if code:
            words = c_char_p()
            self._dll.cuGetErrorString(c_int(code), byref(words))
            said = (words.value or b"unknown error").decode(errors="replace")
            kind = CudaUnavailableError if name.startswith(("cuInit", "cuDevice")) else ArenaError
            raise kind(f"{name} failed with code {code}: {said}")


def _load(library: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise CudaUnavailableError(f"there is no NVIDIA driver on this machine: {error}") from error
