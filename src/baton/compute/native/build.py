"""Compile the native engine: at its first load, or by `python -m baton.compute.native.build`. No torch.

The command also compiles the copy library of `baton.move`, so that the first start compiles nothing.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from baton.move.compiling import NativeSources, NativeUnavailableError
from baton.move.copies import COPIES, KV_FORMATS

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_UNITS = (
    "api", "experts", "memory", "pack", "plan", "quant_pack", "shared_weights", "step", "step_experts", "step_latent",
    "thread_pool", "isa_plain",
)  # fmt: skip
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "isa_avx2": _AVX2,
        "isa_avxvnni": (*_AVX2, "-mavxvnni"),
        "isa_avx512": _AVX512,
        "isa_avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        "isa_amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {"isa_neon": (), "isa_neon_dot": ("-march=armv8.2-a+dotprod",)},
}
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-psabi", "-pthread",
)  # fmt: skip
"""-ffp-contract=off: sums are rounded as written, so that a row's bits do not depend on other rows of its batch.
-Wno-maybe-uninitialized: gcc warns of deliberately undefined vectors in its own headers.
-Wno-psabi: vectors are passed between inlined functions only.
"""


def engine_sources(machine: str) -> NativeSources:
    """Return the sources of the native engine for one kind of machine, such as `aarch64`."""
    units = dict.fromkeys(_UNITS, ()) | _INSTRUCTION_SETS.get(machine, {})
    folder = Path(__file__).parent
    return NativeSources(name="baton-native", folder=folder, flags=_FLAGS, units=units, headers=(KV_FORMATS,))


ENGINE = engine_sources(platform.machine())
library_path = ENGINE.library_path
has_to_be_built = ENGINE.has_to_be_built
build_problem = ENGINE.build_problem


if __name__ == "__main__":
    try:
        library_path()
        COPIES.library_path()
    except NativeUnavailableError as error:
        sys.exit(f"{error}; the torch engine will serve")
