"""The calls of NVIDIA's driver that an arena needs, through ctypes: the server must not load PyTorch.

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
    """There is no usable GPU. The message names the missing part."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The driver, for one device. Any thread may call it; it uses the primary context, as PyTorch does."""

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        """Raises CudaUnavailableError if there is no driver or no such device."""
        self._dll = _load(library)
        self.device = f"cuda:{device}"
        self._context = c_void_p()
        count = c_int()
        self.call("cuInit", c_uint(0))
        self.call("cuDeviceGetCount", byref(count))
        self.device_count = count.value
        """Number of devices that the driver sees."""
        if not 0 <= device < count.value:
            raise CudaUnavailableError(
                f"there is no device cuda:{device}: the driver sees {count.value}; "
                "use one of those, or check CUDA_VISIBLE_DEVICES"
            )
        handle, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(handle), c_int(device))
        self.call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._context = context

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def allocate(self, size_bytes: int) -> int:
        """Reserve device memory and return its address. Raises ArenaError if the device has not enough."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Free memory that `allocate` has reserved."""
        self.call("cuMemFree_v2", c_uint64(address))

    def export(self, address: int) -> bytes:
        """Return the handle with which another process can open an allocation."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.reserved)

    def open(self, exported: bytes) -> int:
        """Map another process's allocation and return its address in this process."""
        address, handle = c_uint64(), _Handle.from_buffer_copy(exported)
        self.call("cuIpcOpenMemHandle_v2", byref(address), handle, _PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap an allocation of another process."""
        self.call("cuIpcCloseMemHandle", c_uint64(address))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver on this device. Raises ArenaError with the driver's message if it fails."""
        if self._context:  # a thread has one current context, which may belong to another device
            self._check("cuCtxSetCurrent", self._dll.cuCtxSetCurrent(self._context))
        self._check(name, self._dll[name](*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = c_char_p()
            self._dll.cuGetErrorString(c_int(code), byref(text))
            message = (text.value or b"unknown error").decode(errors="replace")
            kind = CudaUnavailableError if name.startswith(("cuInit", "cuDevice")) else ArenaError
            raise kind(f"{name} failed with code {code}: {message}")


def _load(library: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise CudaUnavailableError(f"there is no NVIDIA driver on this machine: {error}") from error
