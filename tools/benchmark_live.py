"""Table of docs/benchmarks.md about attacks on a live server, from the results of benchmarks/live_control.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmark_results import load, ms, percent, section


def live_control() -> list[str]:
    """Return what the live server held; a scene without a result is left out."""
    scenes = (_overload, _classes, _fairness, _aborts, _deaths, _hosts, _prices, _roles, _storm, _soak)
    rows = [row for scene in scenes for row in scene()]
    note = (
        f"Each attack has its `live-SCENE.json`.{_other_machines()} Storm: `pytest --deep tests/process/test_storm.py`."
    )
    return section("Control under attack", "live-overload", ["Attack", "Found"], rows, note)


def _other_machines() -> str:
    """Name the scenes that were played on another machine than the one that the section names, with their load."""
    machine = load("live-overload")["environment"]["cpu"]
    found = {
        scene: load(f"live-{scene}").get("environment", {}) for scene in ("aborts", "hosts", "roles", "storm", "soak")
    }
    others = {scene: each for scene, each in found.items() if each and each["cpu"] != machine}
    if not others:
        return ""
    loads = sorted(each["load_before"] for each in others.values())
    cpus = ", ".join(sorted({each["cpu"] for each in others.values()}))
    return f" On {cpus}, load {loads[0]:.0f} to {loads[-1]:.0f}: {', '.join(others)}."


def _beside(cases: Iterable[Sequence[str]]) -> list[str]:
    """Return each figure of all cases as one text, in the order of the cases."""
    return [" / ".join(figures) for figures in zip(*cases, strict=True)]


def _overload() -> list[list[str]]:
    result, rows = load("live-overload"), []
    for name in ("admission", "admit-all"):
        row = result[name]["3"]
        found = [
            f"goodput {percent(row['goodput_rps'] / result['peak_rps'])} of its peak",
            f"{percent(row['admitted_in_slo_ratio'])} of the admitted in SLO",
        ]
        found += [f"refusals in {ms(row['refusal']['p99_s'])} ms (p99)"] if name == "admission" else []
        rows.append([f"3x overload, {name}", ", ".join(found)])
    return rows


def _classes() -> list[list[str]]:
    found = [f"{row['p99_over_idle']:.2f}" for fleet, row in load("live-classes").items() if "-" in fleet]
    return (
        [["saturating free class, 1P1D / mixed", f"premium TTFT p99 over idle: {' / '.join(found)}"]] if found else []
    )


def _fairness() -> list[list[str]]:
    result = load("live-fairness")
    gaps = {name: figures for name, figures in result.items() if isinstance(figures, dict) and "bound" in figures}
    if not gaps:
        return []
    bound = next(iter(gaps.values()))["bound"]
    waits = [
        f"{result[f'single request, {name}']['ttft_s']} s ({name})" for name in ("fair", "first come first served")
    ]
    return [
        [
            "two backlogged tenants",
            f"gap, bound {bound}: " + ", ".join(f"{row['gap']} ({name})" for name, row in gaps.items()),
        ],
        ["one request behind 60 of another tenant", f"TTFT {', '.join(waits)}"],
    ]


def _aborts() -> list[list[str]]:
    result = load("live-aborts")
    if not result:
        return []
    cases = [result, *([result["with_slo"]] if "with_slo" in result else [])]
    after, idle, waiting = _beside(
        (ms(c["first_ttft_after_s"]), ms(c["idle_ttft"]["p50_s"]), str(c["stayed_and_waiting"])) for c in cases
    )
    found = f"TTFT 1 s later {after} ms, idle {idle}; queue of clients that stayed {waiting}"
    return [["10x load, 90 % hang up, without / with SLO", found]]


def _deaths() -> list[list[str]]:
    result = load("live-deaths")
    if not result:
        return []
    found = f"longest gap {ms(result['longest_gap_s'])} ms, same text in {result['same_text']} of {result['streams']}"
    return [["decode worker killed under 16 streams", found]]


def _hosts() -> list[list[str]]:
    result = load("live-hosts")
    if not result:
        return []
    rows = [result["killed"], result["silent"]]
    gaps, again, same = _beside(
        (ms(row["longest_gap_s"]), str(row["recomputed_tokens"]), str(row["same_text"])) for row in rows
    )
    found = (
        f"longest gap {gaps} ms, same text in {same} of {rows[0]['streams']}; of {rows[0]['moved_prompt_tokens']} "
        f"prompt tokens and their answers, {again} computed again"
    )
    return [["host killed / stopped (`hosts.silent_s` = 2), second copies", found]]


def _prices() -> list[list[str]]:
    result = load("live-prices")
    if not result:
        return []
    found = (
        f"{result['idle_refused']} of {result['idle_requests']} refused on an idle server; "
        f"{result['slowdown']:.1f} times slower: error of a step {percent(result['median_error_after'])} (median)"
    )
    return [["wrong prices, throttled worker", found]]


def _roles() -> list[list[str]]:
    found: list[str] = []
    for name, arms in load("live-roles").items():
        if isinstance(arms, dict) and "over_best_static" in arms:
            met = {
                arm: sum(count for key, count in row.items() if key.endswith("_in_slo"))
                for arm, row in arms.items()
                if isinstance(row, dict)
            }
            counts = ", ".join(f"{count} {arm}" for arm, count in met.items())
            found.append(f"{name.partition(',')[0]}: {counts} ({arms['over_best_static']:.2f}x 1P1D)")
    return [["two workers, requests in SLO by roles", "; ".join(found)]] if found else []


def _storm() -> list[list[str]]:
    result = load("live-storm")
    if not result:
        return []
    answers = result["answers"]
    found = (
        f"right answers {answers['right']}, wrong {answers.get('wrong', 0)}, refused {answers.get('refused', 0)}; "
        f"blocks left {result['used_blocks_after']}"
    )
    return [[f"{result['faults']} faults in {result['minutes']:g} minutes", found]]


def _soak() -> list[list[str]]:
    result = load("live-soak")
    if not result:
        return []
    first, last = result["first"], result["last"]
    found = (
        f"TTFT p99 {ms(first['ttft']['p99_s'])} ms in the first sixth, {ms(last['ttft']['p99_s'])} in the last one, "
        f"memory {first['memory_mb']} and {last['memory_mb']} MB"
    )
    return [[f"{result['minutes']:g} minutes at 80 % of the capacity", found]]
