"""KV on the wire: LMCache's page sizes, and Mooncake's break-even bandwidth.

    python benchmarks/published/transfer.py

LMCache with NIXL: the KV of 7,500 tokens of Llama-3.1-8B over NVLink takes 20 ms in pages of 16 and 8 ms in pages
of 128 tokens. Our wire has two constants that were fitted on these two figures: they come out by construction, and
what is simulated is the time from the first to the second token. Mooncake (FAST 2025, equation 2): fetching a prefix of
8,192 tokens of Llama-3-70B pays above 6 GB/s on 8 A800, 19 GB/s on 8 H800. Writes
benchmarks/results/published-transfer.json.
"""

from __future__ import annotations

from random import Random
from statistics import median

from msgspec.structs import replace
from outcome import CLUSTERS, store

from baton.decide.cost.catalog import hardware
from baton.decide.cost.handoff import break_even_bytes_per_s
from baton.decide.cost.load import load_cost
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, read_spec
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.generate import synthetic_trace

PREFIX_TOKENS = 8192
WEIGHTS, TOKEN_BYTES = 70.6e9, 327_680
"""Llama-3-70B: parameters, and bytes of KV a token in 16 bits."""
PUBLISHED_MS = {16: 20.0, 128: 8.0}
PUBLISHED_GB = {"A800-80G-SXM": 6.0, "H800-80G-SXM": 19.0}


def in_pages(spec: ClusterSpec, page_tokens: int) -> ClusterSpec:
    def with_page(kind: SimKind) -> SimKind:
        wire = {**kind.cost["wire"], "block_tokens": page_tokens}
        return replace(kind, cost={**kind.cost, "wire": wire})

    return replace(spec, kinds={name: with_page(kind) for name, kind in spec.kinds.items()})


def second_token_s(spec: ClusterSpec) -> float:
    """Simulate 3.6 requests/s of 8,000 and 200 tokens; the median gap between the first two tokens."""
    trace = synthetic_trace(150, (8000, 200), PoissonArrivals(3.6), Random(0))
    records = replay_trace(spec, trace, policy="distserve", seed=0)
    return median(record.token_times_s[1] - record.token_times_s[0] for record in records)


def break_even_at_peak(name: str) -> float:
    """As the paper counts: every multiplication at the GPUs' peak. 2 a weight and token; attention is left out."""
    saved_s = 2 * WEIGHTS * PREFIX_TOKENS / (8 * hardware(name).bf16_flops)
    return break_even_bytes_per_s(token_bytes=TOKEN_BYTES, saved_s=saved_s, tokens=PREFIX_TOKENS) / 1e9


def break_even(name: str) -> float:
    """With the time that the cost model predicts."""
    section = {"model": "roofline", "llm": "llama3.1-70b", "hardware": name, "tp": 8}
    loaded = load_cost(section, folder=CLUSTERS)
    saved_s = loaded.cost.prefill_s(new_tokens=PREFIX_TOKENS, cached_tokens=0)
    token_bytes = loaded.kinds[""].kv_token_bytes
    return break_even_bytes_per_s(token_bytes=token_bytes, saved_s=saved_s, tokens=PREFIX_TOKENS) / 1e9


def main() -> None:
    spec = read_spec(CLUSTERS / "lmcache-1p1d-h100.yaml")
    pages = {page: in_pages(spec, page) for page in PUBLISHED_MS}
    handoff_ms = {
        page: round(1e3 * made.cost_model().on("h100").handoff_s(tokens=7500, same_host=False), 2)
        for page, made in pages.items()
    }
    gaps_ms = {page: round(1e3 * second_token_s(made), 2) for page, made in pages.items()}
    even_gb = {name: round(break_even(name), 2) for name in PUBLISHED_GB}
    peak_gb = {name: round(break_even_at_peak(name), 2) for name in PUBLISHED_GB}
    for page, value in handoff_ms.items():
        print(f"pages of {page}: {value} ms (published {PUBLISHED_MS[page]}), second token after {gaps_ms[page]} ms")
    for name, value in even_gb.items():
        print(
            f"break-even on 8 {name}: {peak_gb[name]} GB/s (published {PUBLISHED_GB[name]}), {value} as simulated",
            flush=True,
        )
    store(
        "transfer",
        {
            "handoff_ms": {"published": PUBLISHED_MS, "simulated": handoff_ms},
            "second_token_ms": gaps_ms,
            "break_even_gb_per_s": {"published": PUBLISHED_GB, "at_peak": peak_gb, "simulated": even_gb},
        },
    )


if __name__ == "__main__":
    main()
