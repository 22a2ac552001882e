"""Run by test_triton_decode.py in a process of its own: compile the kernels for an H200 (sm_90), without one.

Prints one line per variant: its name and the bytes of shared memory that a program takes.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.compute.triton.kernels import expert_rows_kernel, merge_kernel, split_kernel
from baton.compute.triton.launch import BLOCK_KEYS, INPUTS, OUTPUTS

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES_MAX = 232_448
"""The shared memory of one program on an H100 or H200."""
INTEGERS = ("first_row", "window", "table_width", "row_stride", "inputs", "outputs", "repeat")


def compiled(kernel: triton.JITFunction, pointers: dict[str, str], fixed: dict[str, object]) -> int:
    signature = {
        name: pointers.get(name, "constexpr" if name in fixed else "i32" if name in INTEGERS else "fp32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in fixed.items()})
    return int(triton.compile(source, target=TARGET).metadata.shared)


def split(name: str, number: str, sizes: dict[str, object]) -> None:
    pointers = {"queries": f"*{number}", "kv": f"*{number}", "blocks": "*i32", "lengths": "*i32"}
    products = {"bf16": triton.language.bfloat16, "fp32": triton.language.float32}[number]
    fixed = {"BLOCK_TOKENS": 16, "SPLIT": 512, "SPLITS": 8, "KEYS": BLOCK_KEYS, "DOT": products, **sizes}
    shared = compiled(split_kernel, {**pointers, "parts": "*fp32", "sums": "*fp32"}, fixed)
    assert shared <= SHARED_BYTES_MAX, f"{name} takes {shared} bytes of shared memory, {SHARED_BYTES_MAX} are there"
    print(f"{name}: {shared}")


def main() -> None:
    grouped = {"GROUP": 4, "KV_HEADS": 8, "DIM": 128, "DIM_PAD": 128, "ROPE": 0, "ROPE_PAD": 16, "LATENT": False,
               "BLOCK_ROWS": 1024, "HEADS": 16}  # fmt: skip
    latent = {"GROUP": 128, "KV_HEADS": 1, "DIM": 512, "DIM_PAD": 512, "ROPE": 64, "ROPE_PAD": 64, "LATENT": True,
              "BLOCK_ROWS": 976, "HEADS": 32}  # fmt: skip
    split("grouped bf16", "bf16", grouped)
    split("grouped fp32", "fp32", grouped)
    split("latent bf16", "bf16", latent)
    sizes = {"HEADS": 32, "DIM": 128, "DIM_PAD": 128, "OUT_DIM": 128, "SPLIT": 512, "SPLITS": 8}
    pointers = {"parts": "*fp32", "sums": "*fp32", "lengths": "*i32", "out": "*bf16"}
    print(f"merge: {compiled(merge_kernel, pointers, sizes)}")
    pointers = {"rows": "*bf16", "weights": "*bf16", "experts": "*i64", "out": "*bf16"}
    print(f"experts: {compiled(expert_rows_kernel, pointers, {'OUTPUTS': OUTPUTS, 'INPUTS': INPUTS})}")


if __name__ == "__main__":
    main()
