"""Tables of docs/benchmarks.md about the simulator: accuracy, speed, policies, tiers and published results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from benchmark_results import load, percent, section, signed, triple

SPEED = "at the speed of every second"
FITS = {"fitted to every other request": "alternate", "fitted to first half in time": "first half"}
"""What each fit of the validation against vLLM has seen, in short."""
_SHORT = re.compile(" (of all|alone)")
"""Words of tier names that the table leaves out."""


def speed() -> list[str]:
    rows = [
        [
            case.replace("rate x ", "x"),
            *(f"{figures[python]['requests_per_cpu_s']:,.0f}" for python in ("this", "other python")),
        ]
        for case, figures in load("sim-speed")["median_of"].items()
    ]
    heads = ["Cluster, rate, policy", "Requests/s of CPU time, plain Python build", "Debian's build"]
    lines = section("Speed", "sim-speed", heads, rows)
    fleet = load("sim-speed-fleet")["figures"]
    row = [f"{fleet['requests']:,}", f"{fleet['wall_s']:.0f}", f"{fleet['requests_per_cpu_s']:,.0f}"]
    heads = ["Requests", "Wall s, 2 processes", "Requests/s of CPU time"]
    return lines + section("1,000 workers in 25 cells", "sim-speed-fleet", heads, [row])


def validation() -> list[str]:
    result, rows = load("validation"), []
    has_draws = all("drawn" in run for each in ("pd", "mixed") for run in result[each]["runs"].values())
    for topology in ("pd", "mixed"):
        for case, figures in result[topology]["runs"].items():
            found = figures[SPEED]
            cells = [signed(found[f"{key} {q}"]["error"]) for key in ("ttft_s", "tpot_s") for q in ("mean", "p99")]
            plain = [signed(figures["calibrated"][f"{key} mean"]["error"]) for key in ("ttft_s", "tpot_s")]
            name = case.removesuffix(" of capacity").replace(" prefixes", "")
            drawn = _drawn_cells(figures["drawn"]) if has_draws else []
            rows.append([f"{topology}, {name}", *plain, *cells, *drawn])
    heads = [
        "Topology, prefixes, load of capacity",
        "Calibrated: TTFT",
        "TPOT",
        "At the run's speed: TTFT",
        "p99",
        "TPOT",
        "p99",
        *(["Drawn: TTFT p50/p90/p99", "TPOT", "in range"] if has_draws else []),
    ]
    note = (
        "Error of the simulated mean (and p99). *Calibrated*: with prices fitted before the run. *At the run's speed*: "
        "also told how fast the machine was in every second."
    )
    if has_draws:
        note += " *Drawn*: median of 15 runs with noise, and the figures within their range."
    return section("Against `baton serve`", "validation", heads, rows, note)


def _drawn_cells(drawn: dict[str, Any]) -> list[str]:
    """Return the errors of the simulations with noise, and how many live figures are within their range."""
    errors = [
        "/".join(signed(drawn[f"{key} {quantile}"]["error"]) for quantile in ("p50", "p90", "p99"))
        for key in ("ttft_s", "tpot_s")
    ]
    judged = [row["covers"] for name, row in drawn.items() if name.startswith(("ttft_s", "tpot_s"))]
    return [*errors, f"{sum(judged)} of {len(judged)}"]


def validation_vllm() -> list[str]:
    rows = []
    for setup, fits in load("validation-vllm")["setups"].items():
        for fit, figures in fits.items():
            errors = [signed(figures[key][q]) for key in ("ttft_error", "tpot_error") for q in ("mean", "p90", "p99")]
            rows.append([f"{setup}, {FITS[fit]}", *errors])
    heads = ["Set-up, requests fitted to", "TTFT mean", "p90", "p99", "TPOT mean", "p90", "p99"]
    note = "Error on requests that the fit has not seen."
    return section("Against vLLM 0.19", "validation-vllm", heads, rows, note)


def _fleets(cases: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(case.partition(",")[0] for case in cases))


def roles() -> list[str]:
    """Return the goodput of roles that adapt beside static ones."""
    result = load("roles-second")
    rows, cases = [], result["cases"]
    steady = {case: row["over_best_static"] for case, row in cases.items() if not case.endswith("shifting")}
    worst = {min((case for case in steady if case.startswith(name)), key=steady.__getitem__) for name in _fleets(cases)}
    for case, figures in cases.items():
        if case in steady and case not in worst:
            continue
        best = max(figures["static_rps"], key=lambda split: figures["static_rps"][split])
        cells = (
            figures["static_rps"][best],
            figures["mixed_rps"],
            figures["adaptive_rps"],
            figures["over_best_static"],
        )
        rows.append([case, best, *map(str, cells)])
    heads = [
        "Workers, load",
        "Best split",
        "its goodput, requests/s",
        "mixed workers",
        "`demand-roles`",
        "over the best",
    ]
    note = "`shifting`: prompts and answers take turns each minute; and the worst steady load. No SLO is known."
    return section("Roles that adapt", "roles-second", heads, rows, note)


def policy_matrix() -> list[str]:
    stored = load("policy-matrix")
    found, requests = stored["report"], [row["requests"] for row in stored["rows"].values()]
    policies = ", ".join(found["published"])
    note = (
        f"SLO attainment at 0.6, 0.9 and 1.2 of the capacity, seeds: {found['seeds']}, requests: "
        f"{min(requests)} to {max(requests)}. Published: {policies}. {_sentences(found)}"
    )
    return section("Policies over fleets and loads", "policy-matrix", found["head"], found["lines"], note)


def policy_found() -> list[str]:
    found = load("policy-found")["report"]
    note = "SLO attainment."
    return section("Cells once lost", "policy-found", found["head"], found["lines"], note)


def pull() -> list[str]:
    found: dict[str, dict[str, str]] = {}
    for row in load("pull")["rows"]:
        cell = "/".join(f"{figures['attainment_ratio']:.2f}" for figures in row["loads"].values())
        found.setdefault(row["fleet"], {})[f"`{row['routing']}`:{row['way']}"] = cell
    heads = ["Fleet", *next(iter(found.values()))]
    note = "SLO attainment as above, routed at arrival (push), or from one queue (pull)."
    return section("Push and pull", "pull", heads, [[fleet, *cells.values()] for fleet, cells in found.items()], note)


def predictions() -> list[str]:
    found = load("predictions")["report"]
    note = (
        "Predicted against actual latency. Aims: 15 % at p50, 35 % at p90. Rows within them: "
        f"{_sentences(found).replace(' rows within the aims', '')}"
    )
    return section("Predictions of the default policy", "predictions", found["head"], found["lines"], note)


def _sentences(found: dict[str, Any]) -> str:
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in found["summaries"])


def tiers() -> list[str]:
    names = ("tiers-conversation", "tiers-synthetic")
    pairs = zip(*(load(name)["rows"] for name in names), strict=True)
    rows = [
        [
            f"{pair[0]['hosts']}, {_SHORT.sub('', pair[0]['tiers'])}",
            *(cell for row in pair for cell in _tier_cells(row)),
        ]
        for pair in pairs
    ]
    figures = ["hits", "TTFT mean, s", "p90", "p99"]
    heads = ["Hosts, tiers", f"Conversation: {figures[0]}", *figures[1:], f"Synthetic: {figures[0]}", *figures[1:]]
    note = "Mooncake's traces: prompt tokens found in the cache, and TTFT."
    lines = section("Tiers", " ".join(names), heads, rows, note)
    by_place: dict[str, dict[str, str]] = {}
    for row in load("preemption")["rows"]:
        figures = f"{row['tpot_s']['mean'] * 1e3:.1f}/{row['tpot_s']['p99'] * 1e3:.1f}/{row['e2e_s']['mean']:.1f}"
        by_place.setdefault(f"{row['worker']}; {row['below']}", {})[row["preemption"]] = figures
    ways = ("recompute", "swap", "cheaper")
    rows = [[place, *(found.get(way, "") for way in ways)] for place, found in by_place.items()]
    heads = ["Worker; tier", *(f"`{way}`" for way in ways)]
    note = "Mean TPOT, ms / p99, ms / mean latency, s, by `kv.preemption`."
    return lines + section("Preemption", "preemption", heads, rows, note)


def _tier_cells(row: dict[str, Any]) -> list[str]:
    return [percent(row["prefix_hit_ratio"], 1), *triple(row["ttft_s"])]


def fit() -> list[str]:
    fitted = load("engine-profile-fit")
    error = fitted["error"]
    row = [fitted["engine"], percent(error["mean_ratio"], 1), percent(error["p90_ratio"], 1)]
    return section("Fitted cost model, error on unseen steps", "engine-profile-fit", ["Engine", "mean", "p90"], [row])


def planner() -> list[str]:
    result = load("planner")
    rows = []
    for plan in result["plans"].values():
        answer = plan["answer"]
        rows.append(
            [plan["published"], f"{answer['fleet']}: {answer['rate_rps'] / answer['gpus']:.2f} requests/s per GPU"]
        )
    lines = section("Planner against published answers", "planner", ["Published", "`baton plan`"], rows)
    rates = [
        [rate["setting"], *(f"{rate[f'{whose}_tokens_per_s']:,.0f}" for whose in ("published", "ideal", "vllm-v1"))]
        for rate in result["published_throughput"]
        if rate["output_tokens"] < 500 and "H100" in rate["setting"]
    ]
    heads = ["Tokens/s in fp8", "published", "kernels", "`vllm-v1`"]
    return lines + section("Cost model against published throughput", "planner", heads, rates)
