"""`baton bench`: measure a server under load, print a table, and write the results to files."""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys

import uvloop
from rich.console import Console

from baton.cli.key_flags import API_KEY, client_key
from baton.cli.output import STANDARD_OUTPUT, write_file, write_json
from baton.core.errors import ConfigError
from baton.lab.bench.flags import ATTAINMENT_MIN, INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, TIMEOUT_S, read_options
from baton.lab.bench.options import BenchOptions
from baton.lab.bench.output import facts_table, latency_table, remarks, render_html, watching
from baton.lab.bench.probe import TargetError
from baton.lab.bench.run import BenchReport, RunListener, run_bench
from baton.lab.workload.prompts import VOCAB_TOKENS
from baton.lab.workload.retime import HELP as ARRIVALS_HELP

ABOVE = "the results are above"

DESCRIPTION = """Measure any server that speaks OpenAI's API.

Requests stream and sample greedily. TTFT is the time from sending the request to the first chunk with text. ITL is the
gap between chunks; if a chunk has k tokens, each of them counts with gap / k. A response that is incomplete (no finish
reason, no [DONE]), empty, or not HTTP 200 counts as failed; 429 and 503 count as rejected. Latencies include complete
responses only. Two runs with the same --seed send the same prompts, so the second may hit the server's prefix cache.

Exit code: 0; 1 if a request failed, none completed, the run was stopped, the SLO attainment is below
--attainment-min, or the server cannot be measured; 2 for bad arguments or a bad trace."""

_LOAD = (
    (
        "--trace",
        "FILE",
        "a trace (Mooncake, Azure, BurstGPT, Bailian ...) or a workload file (.toml): docs/workloads.md",
    ),
    ("--input-tokens", "A", f"synthetic requests: input tokens (default {INPUT_TOKENS})"),
    ("--output-tokens", "B", f"synthetic requests: output tokens (default {OUTPUT_TOKENS})"),
    ("--requests", "N", f"requests to send (default {REQUESTS}; with --trace all)"),
    ("--limit", "N", "take at most the first N requests of the trace"),
    ("--max-context", "TOKENS", "shorten requests and end conversations beyond this (default: send them unchanged)"),
    ("--seed", "S", "seed of prompts and arrivals (default 0)"),
    ("--warmup", "N", "requests sent before the run and not measured (default 1)"),
)
_PACING = (
    ("--rate", "R", "open loop: mean requests per second, also instead of the trace's times"),
    ("--arrivals", "KIND", ARRIVALS_HELP),
    (
        "--arrival-cv",
        "X",
        "with --rate: variation of the gaps; 1 Poisson (default), 0 constant, above 1 bursts",
    ),
    ("--concurrency", "C", "closed loop: clients that each wait for their response (default 1 without --trace)"),
    ("--rate-scale", "K", "replay the trace K times as fast (default 1)"),
)
_SERVER = (
    ("--url", "U", "the server, such as http://127.0.0.1:8000 (a path such as /v3 is kept, else /v1 is added)"),
    ("--model", "NAME", "model to ask for (default: the first one that the server lists)"),
    ("--api-key", "K", "sent as a bearer token"),
    ("--api-key-file", "FILE", f"file with the key (default: {API_KEY})"),
    ("--endpoint", "NAME", "completions (default) or chat"),
    ("--prompt-format", "FORMAT", "ids or text (default: ids if the server accepts them)"),
    ("--vocab-tokens", "N", f"prompts of token ids use ids below N (default {VOCAB_TOKENS})"),
    ("--timeout-s", "T", f"a request without a complete response after T seconds has failed (default {TIMEOUT_S:g})"),
)
_RESULTS = (
    ("--ttft-slo-s", "X", "target of TTFT, in seconds"),
    ("--tpot-slo-s", "Y", "target of TPOT, in seconds"),
    ("--attainment-min", "SHARE", f"share of requests that must meet the targets (default {ATTAINMENT_MIN:g})"),
    ("--json", "FILE", "write the results as JSON, in seconds; - for standard output"),
    ("--html", "FILE", "write a report with plots"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command. The parser accepts any values: `run` checks them and reports all problems at once."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for title, flags in (("load", _LOAD), ("pacing", _PACING), ("server", _SERVER), ("results", _RESULTS)):
        group = parser.add_argument_group(title)
        for flag, metavar, words in flags:
            group.add_argument(flag, metavar=metavar, help=words)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly --output-tokens tokens, if the server supports this field",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, show and write the results. Return the exit code."""
    console, errors = Console(), Console(stderr=True)
    try:
        flags = vars(args) | {"api_key": client_key(args)}
        options = read_options({name.replace("_", "-"): value for name, value in flags.items()})
        _raise_open_files()
        with watching(errors) as watcher, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_stoppable(options, watcher))
        if options.json != STANDARD_OUTPUT:
            _show(report, console)
        _write(report)
    except ConfigError as error:
        _say(error)
        return 2
    except TargetError as error:
        _say(error)
        return 1
    return 0 if report.passed else 1


async def _stoppable(options: BenchOptions, watcher: RunListener) -> BenchReport:
    """Run the benchmark and return its results. Ctrl-C ends it early, with the results so far."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await run_bench(options, stop=stop, watcher=watcher)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _raise_open_files() -> None:
    """Raise the limit of open files to the maximum, because an open-loop load may need many connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _show(report: BenchReport, console: Console) -> None:
    console.print(latency_table(report))
    console.print(facts_table(report))
    for remark in remarks(report):
        console.print(f"note: {remark}", markup=False, highlight=False)


def _write(report: BenchReport) -> None:
    if report.options.json is not None:
        write_json(report.options.json, report.results, otherwise=ABOVE)
    if report.options.html is not None:
        write_file(report.options.html, render_html(report).encode(), otherwise=ABOVE)


def _say(error: Exception) -> None:
    for line in str(error).splitlines():
        print(f"baton bench: {line}", file=sys.stderr)  # noqa: T201
