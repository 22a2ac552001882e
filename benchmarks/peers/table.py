"""Format a comparison: milliseconds or tokens per second, ratio to the best peer, percent of the limit."""

from __future__ import annotations

import math
from typing import Any

MATRIX_WEIGHTS = 134.5e6
"""The numbers of SmolLM2-135M's matrices that a decode step reads (the tied embedding once)."""
LAYER_WEIGHTS = 106.2e6
"""The numbers without the output projection, which a prefill computes for one token only."""
KV_VALUES_PER_TOKEN = 2 * 30 * 3 * 64
HEADS_DIM = 9 * 64
LAYERS = 30
WEIGHT_BYTES = {"float32": 538e6, "bfloat16": 269e6, "int8": 142.9e6, "int4": 96.4e6}
"""int8 as Q8_0; int4 as in the embedded file: Q4_1 layers, Q8_0 embedding."""


def limit_s(case: str, weights: str, limits: dict[str, Any], context_tokens: int) -> float:
    """Return the minimum time of a case: the larger of the times of its bytes and its products.

    KV is bfloat16 (float32 with float32 weights); products count at the rate of the activations' float type.
    """
    kind, size = case.split("_")
    computed = "float32" if weights == "float32" else "bfloat16"
    kv_bytes = KV_VALUES_PER_TOKEN * (4 if weights == "float32" else 2)
    count, context = (int(size), context_tokens) if kind == "decode" else (1, int(size))
    rows = count if kind == "decode" else int(size)
    seen = context if kind == "decode" else context / 2
    size_bytes = WEIGHT_BYTES[weights] + count * context * kv_bytes
    products = LAYER_WEIGHTS * rows + (MATRIX_WEIGHTS - LAYER_WEIGHTS) * count + 2 * LAYERS * HEADS_DIM * seen * rows
    rates = {int(read): rate for read, rate in limits["read_bytes_per_s"].items()}
    nearest = min(rates, key=lambda read: abs(math.log(read / size_bytes)))
    return max(size_bytes / rates[nearest], 2 * products / limits["flops"][computed])


def render(figures: dict[str, Any]) -> str:
    """Return a Markdown table per precision of the weights."""
    limits = figures["limits"]
    reads = ", ".join(
        f"{rate / 1e9:.1f} GB/s of {int(size) >> 20} MiB" for size, rate in limits["read_bytes_per_s"].items()
    )
    rates = ", ".join(f"{kind} {rate / 1e9:.0f} GFLOP/s" for kind, rate in limits["flops"].items())
    lines = [f"Limits: reads {reads}; {rates}."]
    for weights in dict.fromkeys(engine["weights"] for engine in figures["engines"]):
        engines = [engine for engine in figures["engines"] if engine["weights"] == weights and engine["seconds"]]
        lines += ["", f"Weights: {weights}. Decode in ms per step, prefill in tokens/s.", ""]
        cases = list(dict.fromkeys(case for engine in engines for case in engine["seconds"]))
        lines += ["| engine | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
        lines += [_row(engine, cases) for engine in engines]
        lines += _our_rows(engines, cases, limits, figures.get("context_tokens", 500))
    return "\n".join(lines) + "\n"


def _row(engine: dict[str, Any], cases: list[str]) -> str:
    cells = [_cell(case, engine["seconds"].get(case)) for case in cases]
    return f"| {engine['engine']} ({engine['version']}) | " + " | ".join(cells) + " |"


def _cell(case: str, spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    kind, size = case.split("_")
    if kind == "prefill":
        return f"{int(size) / spread['least']:,.0f}"
    return f"{spread['least'] * 1000:.1f}"


def _our_rows(
    engines: list[dict[str, Any]], cases: list[str], limits: dict[str, Any], context_tokens: int
) -> list[str]:
    """Return the results of Baton relative to the best peer and to the limit."""
    ours = next((engine["seconds"] for engine in engines if engine["engine"] == "baton"), {})
    peers = [engine["seconds"] for engine in engines if engine["engine"] != "baton"]
    ratios, shares = [], []
    for case in cases:
        theirs = [seconds[case]["least"] for seconds in peers if case in seconds]
        mine = ours.get(case, {}).get("least")
        ratios.append(f"{min(theirs) / mine:.2f}x" if theirs and mine else "-")
        weights = engines[0]["weights"]
        shares.append(f"{limit_s(case, weights, limits, context_tokens) / mine:.0%}" if mine else "-")
    rows = {"baton against the best peer": ratios, "baton, share of the limit": shares}
    return [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
