"""The table of published results in docs/benchmarks.md: tools/published.toml beside the simulated figures."""

from __future__ import annotations

import tomllib
from typing import Any

from benchmark_results import is_stale, load, origin
from docgen import ROOT, table

ROWS_FILE = ROOT / "tools" / "published.toml"
Result = dict[str, Any]


def _numbers(values: dict[str, Any]) -> str:
    return ", ".join(f"{value:g}" for value in values.values() if value is not None)


def _named(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _scheduling(result: Result) -> str:
    return _numbers(result["simulated_over_global"])


def _break_even(result: Result) -> str:
    return _numbers(result["break_even_gb_per_s"]["at_peak"])


def _handoff(result: Result) -> str:
    return _numbers(result["handoff_ms"]["simulated"])


def _early_rejection(result: Result) -> str:
    found = ", ".join(f"{name} {row['refused_or_slow']:,}" for name, row in result["simulated"].items())
    return f"{found} of {result['requests']:,}"


def _capacity(result: Result) -> str:
    slices = [part["gain_over_prompts_first_ratio"] for part in result["simulated_by_slice"]]
    return ", ".join(f"{min(gains):+.0%} to {max(gains):+.0%}" for gains in zip(*slices, strict=True))


def _cache(result: Result) -> str:
    return ", ".join(f"{trace} {result[trace]['global over local']:.2f}" for trace in ("conversation", "synthetic"))


def _distserve_example(result: Result) -> str:
    gains = result["gain_simulated"]
    return f"{gains['vllm']:g} with vLLM's steps, {gains['distserve']:g} with their engine's"


def _distserve_optimum(result: Result) -> str:
    return ", ".join(f"{value:.2f}" for value in result["by_seed_rps_per_gpu"]["1 prefill tp2, 1 decode tp1"])


def _dynamo(result: Result) -> str:
    return f"{result['split_over_colocated']['50']:g}"


def _rates(result: Result) -> str:
    return _named(result["simulated_rps"])


def _shifting(result: Result) -> str:
    found = result["arrow, rate over that of the trace"]
    return f"arrow {found['arrow over static']:g}, baton {found['baton over static']:g}"


def _tetriinfer(result: Result) -> str:
    wanted = (2, 1, 24, "all at once")
    keys = ("gpus of an engine", "vllm engines", "vllm batch", "rate_rps")
    rows = [row for row in result["simulated over vllm"] if tuple(row[key] for key in keys) == wanted]
    return "; ".join(f"{_mix(row['mix'])} {row['TTFT']:+.0%}, {row['JCT']:+.0%}" for row in rows)


def _mix(name: str) -> str:
    """Shorten `light prompts, heavy answers` to `light/heavy`."""
    return name.replace(" prompts, ", "/").removesuffix(" answers")


def _sarathi(result: Result) -> str:
    return ", ".join(f"{row['gain']:g}" for row in result["simulated_rps"])


def _vtc_bound(result: Result) -> str:
    return ", ".join(f"{gap:,.0f}" for gap in result["worst_difference_weighted_tokens"]["vtc"].values())


def _vtc_curves(result: Result) -> str:
    return ", ".join(f"{result[kind]['TTFT simulated_s']['eight that ask least']:.1f}" for kind in ("FCFS", "VTC"))


SIMULATED = {
    "scheduling": _scheduling,
    "break_even": _break_even,
    "handoff": _handoff,
    "early_rejection": _early_rejection,
    "capacity": _capacity,
    "cache": _cache,
    "distserve_example": _distserve_example,
    "distserve_optimum": _distserve_optimum,
    "dynamo": _dynamo,
    "rates": _rates,
    "shifting": _shifting,
    "tetriinfer": _tetriinfer,
    "sarathi": _sarathi,
    "vtc_bound": _vtc_bound,
    "vtc_curves": _vtc_curves,
}


def published() -> list[str]:
    rows = [row for row in tomllib.loads(ROWS_FILE.read_text())["row"] if not is_stale(row["result"])]
    cells = [
        [row["statement"], row["published"], SIMULATED[row["simulated"]](load(row["result"])), row["remark"]]
        for row in rows
    ]
    names = list(dict.fromkeys(row["result"] for row in rows))
    lines = ["### Published results", "", table(["Statement", "Published", "Simulated", "Remark"], cells), ""]
    return [*lines, "; ".join(origin(name, short=True) for name in names), ""]
