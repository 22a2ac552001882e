"""Precision of KV conversions: the lossless pairs of types, and a description of the rounding of all others."""

from __future__ import annotations

from baton.decide.kv.layout import KVDtype

BITS: dict[KVDtype, int] = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 7, "fp8": 4}
"""Significant bits. uint8 (hash engine) is not a number and cannot be converted."""
WIDER: dict[KVDtype, frozenset[KVDtype]] = {
    "bfloat16": frozenset({"float32"}),
    "float16": frozenset({"float32"}),
    "int8": frozenset({"float32"}),
    "fp8": frozenset({"float32"}),
}
"""Types that represent every value of a type without loss, scale included. The product of an 8-bit value and its scale
needs up to 31 bits, but engines compute it in float32, so float32 is lossless."""


def loss(source: KVDtype, target: KVDtype) -> str | None:
    """Describe the rounding of a conversion between KV types. Empty: lossless. None: no conversion exists."""
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
