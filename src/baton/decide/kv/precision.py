"""What becomes of KV numbers that change their type: which pairs lose nothing, and in words what the others lose."""

from __future__ import annotations

from baton.decide.kv.layout import KVDtype

BITS: dict[KVDtype, int] = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 7, "fp8": 4}
"""Significant bits. Bytes of the hash engine are no numbers: they become nothing else."""
WIDER: dict[KVDtype, frozenset[KVDtype]] = {
    "bfloat16": frozenset({"float32"}),
    "float16": frozenset({"float32"}),
    "int8": frozenset({"float32"}),
    "fp8": frozenset({"float32"}),
}
"""Types that hold every number of a type as its reader has it, scale included. Those of 8 bits and their scale need up
to 31 bits: float32 has the 24 that an engine's own product of the two has."""


def loss(source: KVDtype, target: KVDtype) -> str | None:
    """Say in words what KV numbers lose on their way to another type. Empty: nothing. None: there is no such way."""
    if source == target or target in WIDER.get(source, ()):
        return ""
    if source not in BITS or target not in BITS:
        return None
    return f"KV went from {source} to {target}: {_rounding(source, target)}"


def _rounding(source: KVDtype, target: KVDtype) -> str:
    match target:
        case "int8":
            return "each number was rounded to 1/127 of the largest of its head"
        case "fp8":
            return "each number was rounded to 4 significant bits, and to 1/229376 of the largest of its head"
        case "float16":
            kept = f"each number was rounded to {min(BITS[source], BITS[target])} significant bits"
            return f"{kept}, fewer below 0.00006, and is infinite from 65520 on"
        case _:
            return f"each number was rounded to {BITS[target]} significant bits"
