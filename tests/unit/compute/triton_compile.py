"""Run by test_triton_decode.py in a process of its own: compile the kernels as they are launched, without a GPU.

The real launch code runs over CPU tensors; a driver without a device takes the binaries. So types, alignments and
options are those of a launch. Prints one line per binary: its name, then the registers of a thread, the bytes of its
stack (spilled registers), and the shared memory of a program. Contexts, layers and windows of all sizes must run the
same binary: a further one of the same name is printed as `again`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.compute.torch.kernels.layer_ops import NewTokens
from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.triton.fused import FusedBackend
from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel, TritonRowProduct
from baton.compute.triton.layer_ops import TritonOps
from baton.compute.triton.persistent import PersistentDecodeKernel
from baton.decide.kv.layout import KVDtype, KVLayout

SHARED_BYTES_MAX = {80: 166_912, 90: 232_448, 100: 232_448}
"""The shared memory of one program, by compute capability: A100, H100 and H200, B200."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GROUPED = {"group4_dim128": (32, 8, 128), "group3_dim64": (9, 3, 64), "group8_dim256": (16, 2, 256)}
LATENT = {"latent_16_heads": (16, 1, 576), "latent_128_heads": (128, 1, 576)}


class Device:
    """A driver for Triton without a device: it keeps the names and the resources of the binaries, and runs nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = self
        self.binaries: dict[str, tuple[int, int, int]] = {}
        self.case = ""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES_MAX[self.capability] + device}

    def launcher_cls(self, source: object, metadata: object) -> object:
        return lambda *arguments: None

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Note a binary and its resources, as the assembler has written them.

        The last number returned is the most threads that a program with so many registers can have. Triton refuses a
        program of more.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.findall(rf"{what}:(\d+)", told)[-1]) for what in ("REG", "STACK"))
        key = f"sm_{self.capability} {self.case} {name}"
        self.binaries[f"{key} again" if key in self.binaries else key] = (registers, stack, shared)
        return 0, 0, registers, stack // 4, min(1024, 65_536 // registers)

    def unload_module(self, module: int) -> None:
        """Nothing was loaded."""


def decode(heads: tuple[int, int, int], number: torch.dtype, stored: KVDtype, *, rope_dim: int) -> None:
    """Launch decode steps of both forms with tables of several widths, in two layers."""
    count, kv_heads, head_dim = heads
    layout = KVLayout(
        layers=2, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16, dtype=stored, planes=1 if rope_dim else 2
    )
    kv = PagedKV(torch.zeros(layout.block_bytes, dtype=torch.uint8), layout)
    queries = torch.zeros((2, count, head_dim), dtype=number)
    for kernel in (TritonDecodeKernel(number, rope_dim), PersistentDecodeKernel(number, rope_dim)):
        for blocks, window in ((256, None), (1, None), (48, 1), (512, 16), (37, 30)):  # 8 splits, 1, 2, 16, 2
            tables = DecodeTables(torch.zeros((2, blocks), dtype=torch.int32), torch.ones(2, dtype=torch.int32))
            plan = kernel.plan(tables, kv)
            for layer in range(2):
                plan.run(layer, queries, window)


def chunks(heads: tuple[int, int, int], number: torch.dtype, stored: KVDtype) -> None:
    """Launch chunks with tables of several widths, in two layers, with and without a window."""
    count, kv_heads, head_dim = heads
    layout = KVLayout(layers=2, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16, dtype=stored)
    kv = PagedKV(torch.zeros(layout.block_bytes, dtype=torch.uint8), layout)
    backend = TritonBackend(TritonDecodeKernel(products=number))
    for start, tokens in ((0, 70), (16, 2), (4096, 500)):
        blocks = torch.zeros(-(-(start + tokens) // 16), dtype=torch.int64)
        plan = backend.plan([Row(0, tokens, start, blocks)], kv)
        for layer, window in ((0, None), (1, 16), (1, 30)):
            plan.run(layer, torch.zeros(tokens, count, head_dim, dtype=number), window)


def mixed(heads: tuple[int, int, int], number: torch.dtype, stored: KVDtype) -> None:
    """Launch steps of a chunk and decoding requests with tables of several widths, in two layers, with windows."""
    count, kv_heads, head_dim = heads
    layout = KVLayout(layers=2, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16, dtype=stored)
    kv = PagedKV(torch.zeros(layout.block_bytes, dtype=torch.uint8), layout)
    backend = FusedBackend(TritonDecodeKernel(products=number), programs=264, pools=256)
    for start, tokens in ((0, 70), (16, 2), (8192, 500)):
        blocks = torch.zeros(-(-(start + tokens) // 16), dtype=torch.int64)
        rows = [Row(index, 1, start, blocks) for index in range(1 + start % 5)]
        plan = backend.plan([*rows, Row(len(rows), tokens, start, blocks)], kv)
        for layer, window in ((0, None), (1, 16), (1, 30)):
            plan.run(layer, torch.zeros(len(rows) + tokens, count, head_dim, dtype=number), window)


def layers(heads: tuple[int, int, int], number: torch.dtype, stored: KVDtype) -> None:
    """Launch the operations between the products of a layer."""
    count, kv_heads, head_dim = heads
    size, ops = count * head_dim, TritonOps()
    layout = KVLayout(layers=2, kv_heads=kv_heads, head_dim=head_dim, block_tokens=16, dtype=stored)
    kv = PagedKV(torch.zeros(layout.block_bytes, dtype=torch.uint8), layout)
    hidden, weight = torch.zeros(2, size, dtype=number), torch.zeros(size, dtype=number)
    ops.add_norm(hidden, hidden, weight, 1e-5)
    ops.gate(torch.zeros(2, 8 * size, dtype=number))
    angles = torch.zeros(2, 1, head_dim, dtype=number)
    new = NewTokens(angles, angles, torch.zeros(2, dtype=torch.int64), kv)
    for layer in range(2):
        ops.rotate_and_write(torch.zeros(2, count + 2 * kv_heads, head_dim, dtype=number), layer, new, None)


def main() -> None:
    """Arguments: types of numbers, shapes (or `all`), and a compute capability.

    A process compiles for one capability: Triton keeps the kernels of a device by its index, which is always 0 here.
    """
    numbers = {"bf16": torch.bfloat16, "fp32": torch.float32}
    device = Device(int(sys.argv[3]))
    triton.runtime.driver.set_active(device)
    for name in sys.argv[1].split(","):
        number = numbers[name]
        for shapes, rope_dim in ((GROUPED, 0), (LATENT, 64)):
            for shape, heads in shapes.items():
                if sys.argv[2] in (shape, "all"):
                    plain: KVDtype = "bfloat16" if number == torch.bfloat16 else "float32"
                    for stored in (plain, "fp8"):
                        device.case = f"{shape} {name}" + (" of fp8" if stored == "fp8" else "")
                        decode(heads, number, stored, rope_dim=rope_dim)
                        if not rope_dim:
                            layers(heads, number, stored)
                        if not rope_dim and (stored == plain or sys.argv[2] == "all"):
                            chunks(heads, number, stored)  # those of fp8 take 5 s of CPU for each shape
                            mixed(heads, number, stored)
        device.case = f"experts {name}"
        TritonRowProduct()(torch.zeros(2, 2048, dtype=number), torch.zeros(4, 768, 2048, dtype=number),
                           torch.zeros(4, dtype=torch.int64))  # fmt: skip
    for binary, figures in device.binaries.items():
        print(f"{binary}: {' '.join(map(str, figures))}")


if __name__ == "__main__":
    main()
