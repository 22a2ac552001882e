"""Compile the native engine: at its first load, or by `python -m baton.compute.native.build`. No torch.

A library has kernels for the instruction sets of this processor only, because each set takes 10 to 20 s of CPU time to
compile. With `--all` it has those of every processor of this kind: for an image that other machines run.
The command also compiles the copy library of `baton.move`, so that the first start compiles nothing.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from baton.move.compiling import NativeSources, NativeUnavailableError
from baton.move.copies import COPIES, KV_FORMATS
from baton.move.cores import processor_features

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


_FEATURES = {
    "isa_avx2": {"avx2", "fma", "f16c"},
    "isa_avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "isa_avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "isa_avx512bf16": {"avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "isa_amx": {"avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
    "isa_neon_dot": {"asimddp"},
}
"""What a processor must have, by the names in /proc/cpuinfo, to execute the kernels of a unit."""


def engine_sources(machine: str, features: frozenset[str] | None = None) -> NativeSources:
    """Return the sources of the native engine for one kind of machine, such as `aarch64`.

    features: those of the only processor that will load the library, as /proc/cpuinfo names them. None: of any one.
    """
    sets = {
        unit: options
        for unit, options in _INSTRUCTION_SETS.get(machine, {}).items()
        if features is None or _FEATURES.get(unit, set()) <= features
    }
    units = dict.fromkeys(_UNITS, ()) | sets
    folder = Path(__file__).parent
    return NativeSources(name="baton-native", folder=folder, flags=_FLAGS, units=units, headers=(KV_FORMATS,))


FULL_ENGINE = engine_sources(platform.machine())
"""For every processor of this kind."""
ENGINE = engine_sources(platform.machine(), processor_features() or None)
"""For this processor."""


def library_path() -> Path:
    """Return the path of the compiled library. Compile it if none is cached. Raises NativeUnavailableError."""
    return FULL_ENGINE.cached() or ENGINE.library_path()


def has_to_be_built() -> bool:
    """Return whether `library_path` would compile."""
    return FULL_ENGINE.cached() is None and ENGINE.has_to_be_built()


def build_problem() -> str:
    """Return why no library is cached and none can be compiled. Empty: one is, or can be."""
    return "" if FULL_ENGINE.cached() else ENGINE.build_problem()


if __name__ == "__main__":
    try:
        (FULL_ENGINE.library_path if "--all" in sys.argv[1:] else library_path)()
        COPIES.library_path()
    except NativeUnavailableError as error:
        sys.exit(f"{error}; the torch engine will serve")
