"""How the native engine is compiled: `python -m baton.compute.native.build`, or when it is first loaded.

The command compiles the copies of `baton.move` too, so that nothing is left to do at the first start. No torch here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from baton.move.compiling import NativeSources, NativeUnavailableError
from baton.move.copies import COPIES

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
ENGINE = NativeSources(
    name="baton-native",
    folder=Path(__file__).parent,
    flags=(
        "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off",
        "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-pthread",
    ),
    units={
        "api": (),
        "experts": (),
        "memory": (),
        "pack": (),
        "plan": (),
        "quant_pack": (),
        "step": (),
        "step_experts": (),
        "step_latent": (),
        "team": (),
        "isa_plain": (),
        "isa_avx2": _AVX2,
        "isa_avx512": _AVX512,
        "isa_avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        "isa_amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    },
)  # fmt: skip
"""-ffp-contract=off: a sum is rounded as it is written, in every use; that a row's bits never depend on its company
rests on it. gcc warns of its own headers' deliberately undefined vectors, so that warning is off."""

library_path = ENGINE.library_path
has_to_be_built = ENGINE.has_to_be_built
can_be_built = ENGINE.can_be_built


if __name__ == "__main__":
    try:
        library_path()
        COPIES.library_path()
    except NativeUnavailableError as error:
        sys.exit(f"{error}; the torch engine will serve")
