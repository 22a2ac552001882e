"""Wait until the kernels of a step have run. On a GPU, an operation returns when its kernel is queued."""

from __future__ import annotations

from typing import Protocol

import torch

from baton.core.errors import DeviceError


class KernelQueue(Protocol):
    """The kernels that this process has launched on its device, in order."""

    def wait(self) -> None:
        """Return when every launched kernel has ended. Raises DeviceError if a kernel or the device has failed."""
        ...


class HostQueue:
    """Implements `KernelQueue` for a CPU, where every operation returns after its last write."""

    def wait(self) -> None:
        return


class CudaQueue:
    """Implements `KernelQueue` for the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def wait(self) -> None:
        # CUDA reports a kernel's failure (device assert, illegal address) at a later call, and every call after it
        # fails too: the context of this process is lost.
        try:
            self._event.record(torch.cuda.current_stream(self._device))
            self._event.synchronize()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise DeviceError(f"{self._device} can no longer compute in this process: {reason}") from error


def queue_of(device: torch.device) -> KernelQueue:
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
