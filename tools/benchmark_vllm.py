"""Tables of docs/benchmarks.md about Baton beside vLLM and behind a gateway. Each returns lines of Markdown."""

from __future__ import annotations

from benchmark_results import load, section


def overhead() -> list[str]:
    result = load("vllm-overhead")
    rows: list[list[str]] = []
    for name, of in result["medians"].items():
        theirs, ours = of["vllm"], of["baton"]
        ratio = ours["output_throughput"] / theirs["output_throughput"]
        rows.append(
            [
                name,
                f"{theirs['median_ttft_ms']:,.0f}",
                f"{ours['median_ttft_ms'] - theirs['median_ttft_ms']:+.1f}",
                f"{theirs['output_throughput']:.1f}",
                f"{ratio:.1%}",
            ]
        )
    heads = ["Load", "vLLM's TTFT p50, ms", "with Baton", "output tokens/s", "with Baton"]
    return section("Baton before one vLLM server", "vllm-overhead", heads, rows)


def picks() -> list[str]:
    result = load("gateway-picks")
    row = [
        f"{result['picks_per_cpu_s']:,}",
        f"{result['picks_per_s']:,}",
        f"{result['pick_s']['p50'] * 1e3:.1f}",
        f"{result['pick_s']['p99'] * 1e3:.1f}",
    ]
    heads = ["Picks per CPU second", "picks/s of this client", "p50, ms", "p99"]
    return section("Endpoint picker on one core", "gateway-picks", heads, [row])
