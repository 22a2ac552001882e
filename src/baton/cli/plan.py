"""`baton plan`: find the hardware, roles and parallelism for a model and a load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.cli.output import STANDARD_OUTPUT, warn, write_file, write_json
from baton.cli.tables import wide_console
from baton.core.errors import ConfigError
from baton.core.files import form_of, in_file, keys_of, output_problems
from baton.lab.plan.files import cluster_yaml, group_lines, helm_values
from baton.lab.plan.page import GROUP_HEAD, plan_page
from baton.lab.plan.recommend import Recommendation, make_report, recommend_screened, screen
from baton.lab.plan.serving import missing_feature_lines, serve_toml
from baton.lab.plan.spec import read_plan_input

DESCRIPTION = """Search hardware, workers, parallelism and precision for the fleet with the best --objective within the
SLO, and explain the choice. The best candidates are simulated. See docs/planner.md.

Exit code: 0; 1 if the fleet carries less than the asked rate or misses the SLO in simulation; 2 for bad arguments, a
model that does not fit, or an SLO that no hardware meets."""
OBJECTIVES = ("goodput-per-dollar", "goodput-per-watt", "goodput-per-gpu", "cheapest")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE", help="the plan's parameters as TOML or YAML; flags override them")
    add("--llm", metavar="MODEL", help="a model by name, or its config.json")
    add("--hardware", action="append", default=[], metavar="NAME=GPUS[@USD]",
        help="number of GPUs of a kind, and their price per GPU and hour; repeatable")  # fmt: skip
    add("--trace", metavar="FILE", help="the workload, in any format of baton bench")
    add("--input-tokens", type=int, metavar="A", help="mean prompt length, instead of a trace")
    add("--output-tokens", type=int, metavar="B", help="mean output length, instead of a trace")
    add("--rate", type=float, metavar="R", help="requests per second (default: the trace's rate, or the maximum)")
    add("--cached-ratio", type=float, metavar="C", help="share of prompt tokens that hit the prefix cache (default 0)")
    add("--ttft-slo-s", type=float, metavar="X", help="target of TTFT, in seconds")
    add("--tpot-slo-s", type=float, metavar="Y", help="target of TPOT, in seconds")
    add("--attainment", type=float, metavar="P", help="share of requests that must meet both targets (default 0.9)")
    add("--objective", choices=OBJECTIVES, help="quantity to maximize (default goodput-per-dollar)")
    add("--engine", metavar="NAME", help="engine profile (default vllm-v1)")
    add("--weights", metavar="LIST", help="weight formats to try: bf16,fp8,int8,int4 (default bf16)")
    add("--kv", metavar="LIST", help="KV formats to try: bf16,fp8 (default bf16)")
    add("--tp", metavar="LIST", help="tensor-parallel degrees to try (default 1,2,4,8)")
    add("--pp", metavar="LIST", help="pipeline stages to try (default 1)")
    add("--cp", metavar="LIST", help="context-parallel degrees to try, for long prompts (default 1)")
    add("--shape", choices=("best", "disaggregated", "mixed"), help="shape of the fleet (default best: try both)")
    add("--pool-penalty", type=float, metavar="P",
        help="share of the price that each pool beyond one per role must save (default 0.05)")  # fmt: skip
    add("--spare-workers", type=int, metavar="N",
        help="workers of each pool that may be lost while the others carry the rate (default 0; 1: N+1)")  # fmt: skip
    add("--spare-hosts", type=int, metavar="N",
        help="hosts that may fail while the others carry the rate (default 0)")  # fmt: skip
    add("--growth", type=float, metavar="G", help="growth of the rate per month, to plan the next purchases: 0.1")
    add(
        "--admission",
        metavar="LIST",
        help="admission to try: slo (reject requests that would be late), all (default both)",
    )
    add("--reach", choices=("node", "network"), help="range of handoffs (default: node if one node holds all GPUs)")
    add("--finalists", type=int, metavar="N", help="candidates to simulate (default 2; 0: skip the simulation)")
    add("--requests", type=int, metavar="N", help="minimum requests in each simulation (default 400)")
    add("--seed", type=int, metavar="S", help="seed of the simulations (default 0)")
    add("--tune", action="store_true", default=None, help="choose the fleet's policies, too, as baton tune")
    for flag, what in (
        ("--json", "the plan as JSON; - for standard output"), ("--html", "the plan as a page"),
        ("--serve-config", "a configuration for baton serve --config"), ("--kubernetes", "values for the Helm chart"),
        ("--cluster", "the fleet as a cluster for baton sim"),
    ):  # fmt: skip
        add(flag, type=Path, metavar="FILE", help=f"write {what}")


def run(args: argparse.Namespace) -> int:
    """Plan, print the result and write the requested files. Return the exit code. Raises ConfigError."""
    wrong = output_problems(
        {
            "--json": args.json, "--html": args.html, "--serve-config": args.serve_config,
            "--kubernetes": args.kubernetes, "--cluster": args.cluster,
        }
    )  # fmt: skip
    if wrong:
        raise ConfigError("\n".join(wrong))
    folder = args.file.parent if args.file is not None else Path()
    screened = screen(read_plan_input(_merged(args), folder))
    finalists = screened.question.spec.finalists
    warn(
        [
            f"screened {len(screened.search.options)} kinds of workers; the best fleet is {screened.best.name}"
            + (f"; simulating up to {finalists} fleets" if finalists else "")
        ]
    )
    found = recommend_screened(screened, lambda words: warn([words]))
    if args.json != STANDARD_OUTPUT:
        _show(found)
    _write(args, found)
    return 1 if found.short else 0


def _merged(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of FILE, overridden by the flags. Raises ConfigError if a required setting is missing."""
    raw = _read(args.file) if args.file is not None else {}
    plain = {
        "llm": _flag_path(args.llm, args.file) if (args.llm or "").endswith(".json") else args.llm,
        "objective": args.objective, "engine": args.engine, "shape": args.shape,
        "pool_penalty_ratio": args.pool_penalty, "spare_workers": args.spare_workers,
        "spare_hosts": args.spare_hosts, "reach": args.reach,
        "finalists": args.finalists, "requests": args.requests, "seed": args.seed,
        "tune": args.tune,
        "weights": _words(args.weights), "kv": _words(args.kv), "tp": _numbers("--tp", args.tp),
        "pp": _numbers("--pp", args.pp), "cp": _numbers("--cp", args.cp),
        "admission": _words(args.admission),
        "hardware": [_hardware(text) for text in args.hardware] or None,
    }  # fmt: skip
    raw |= {key: value for key, value in plain.items() if value is not None}
    below = {
        "slo": {"ttft_s": args.ttft_slo_s, "tpot_s": args.tpot_slo_s, "attainment_ratio": args.attainment},
        "workload": {
            "trace": _flag_path(args.trace, args.file),
            "input_tokens": args.input_tokens, "output_tokens": args.output_tokens,
            "rate_rps": args.rate, "cached_ratio": args.cached_ratio, "growth_ratio": args.growth,
        },
    }  # fmt: skip
    for key, values in below.items():
        given = {name: value for name, value in values.items() if value is not None}
        raw[key] = {**raw.get(key, {}), **given}
    missing = [
        flag
        for flag, value in (
            ("--llm", raw.get("llm")), ("--hardware", raw.get("hardware")),
            ("--ttft-slo-s", raw["slo"].get("ttft_s")), ("--tpot-slo-s", raw["slo"].get("tpot_s")),
        )
        if value is None
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"baton plan needs {', '.join(missing)} (or their keys in FILE)")
    return raw


def _flag_path(path: str | None, file: Path | None) -> str | None:
    """Return a flag's path as absolute if FILE is given, because relative paths refer to the folder of FILE."""
    return path if path is None or file is None else str(Path(path).absolute())


def _read(path: Path) -> dict[str, Any]:
    with in_file(path, "the plan"):
        found = keys_of(path.read_text(encoding="utf-8"), form_of(path), example='llm = "llama3.1-8b"')
        wrong = [key for key in ("slo", "workload") if not isinstance(found.get(key, {}), dict)]
        if wrong:
            raise ConfigError("\n".join(f"{key} must be a section: write [{key}] and its keys below" for key in wrong))
        return found


def _hardware(text: str) -> dict[str, Any]:
    name, _, rest = text.partition("=")
    gpus, _, price = rest.partition("@")
    try:
        found: dict[str, Any] = {"name": name, "gpus": int(gpus)}
        if price:
            found["usd_per_hour"] = float(price)
    except ValueError as error:
        raise ConfigError(
            f"--hardware {text}: write NAME=GPUS or NAME=GPUS@USD, such as H100-80G-SXM=8@4.76"
        ) from error
    return found


def _words(text: str | None) -> list[str] | None:
    return [word.strip() for word in text.split(",")] if text else None


def _numbers(flag: str, text: str | None) -> list[int] | None:
    try:
        return [int(word) for word in _words(text) or ()] or None
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: write whole numbers with commas between them, such as 1,2,4") from error


def _show(found: Recommendation) -> None:
    console, best = wide_console(), found.best
    _show_lines(console, "Verdict", found.verdict)
    console.print()
    table = Table(*GROUP_HEAD)
    for row in group_lines(found):
        table.add_row(*row[: len(GROUP_HEAD)])
    console.print(table)
    said = (
        ("Why", found.reasons), ("Borrowed, not measured", found.notes),
        ("Not served as planned", missing_feature_lines(best)),
        ("Not recommended", found.not_recommended), ("Cannot be built", found.out),
    )  # fmt: skip
    for title, lines in said:
        if lines:
            console.print()
            _show_lines(console, title, lines)


def _show_lines(console: Console, title: str, lines: Sequence[str]) -> None:
    console.print(f"[bold]{title}[/bold]")
    for line in lines:
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)


def _write(args: argparse.Namespace, found: Recommendation) -> None:
    if args.json is not None:
        write_json(args.json, make_report(found))
    made = (
        (args.html, lambda: plan_page(found)),
        (args.serve_config, lambda: serve_toml(found)),
        (args.kubernetes, lambda: helm_values(found)),
        (args.cluster, lambda: cluster_yaml(found)),
    )
    for path, make in made:
        if path is not None:
            write_file(path, make().encode())
