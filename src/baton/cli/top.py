"""`baton top`: show a server's load, latencies and KV blocks, live in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Group
from rich.live import Live
from rich.table import Table

from baton.cli.ask_server import URL, add_model, ask, check_url, decode_answer, events, of_model
from baton.cli.key_flags import add_client_key, client_key
from baton.cli.tables import wide_console
from baton.core.errors import BatonError, ConfigError
from baton.move.clock import now_s
from baton.serve.live.history import Opening, Sample
from baton.serve.live.status import ClusterStatus, HostStatus, TierStatus

WINDOW_SAMPLES = 10
"""Samples that the figures cover, one a second."""
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "queue": "queue", "handoff": "handoff"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show a server's load, latencies and KV blocks, live. Ctrl-C ends it."
    add = parser.add_argument
    add("--url", default=URL, metavar="U", help="the server (default: %(default)s)")
    add("--interval-s", type=float, default=1.0, metavar="T", help="seconds between updates (default 1)")
    add_client_key(parser)
    add_model(parser)
    add("--once", action="store_true", help="show the state once and exit")


def run(args: argparse.Namespace) -> int:
    """Show the state until Ctrl-C. Return the exit code: 1 if the server cannot be reached."""
    check_url(args.url)
    if args.interval_s <= 0:
        raise ConfigError(f"--interval-s is {args.interval_s}, but must be above 0")
    console, screens = wide_console(), _screens(args, client_key(args))
    try:
        first = next(screens)
        if args.once:
            console.print(first)
            return 0
        with Live(first, console=console, auto_refresh=False) as live:
            for screen in screens:
                live.update(screen, refresh=True)
    except KeyboardInterrupt:
        return 0
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 1


def _screens(args: argparse.Namespace, key: str | None) -> Iterator[Group]:
    """Yield a screen for each interval, the first at once. Raises BatonError once the server ends."""
    path = of_model("/cluster", args.model)
    joint = "&" if "?" in path else "?"
    stream = events(args.url, of_model("/cluster/events", args.model) + f"{joint}samples={WINDOW_SAMPLES}", key)
    opening = decode_answer(next(stream, b""), Opening, args.url)
    window: deque[Sample] = deque(maxlen=WINDOW_SAMPLES)
    left, drawn_s = opening.past_samples, 0.0
    for data in stream:
        window.append(decode_answer(data, Sample, args.url))
        left -= 1
        if left > 0 or now_s() - drawn_s < args.interval_s:
            continue
        drawn_s = now_s()
        yield screen(opening.model, decode_answer(ask(args.url, path, key), ClusterStatus, args.url), window)
    raise BatonError(f"the server at {args.url} has ended")


def screen(model: str, status: ClusterStatus, window: Sequence[Sample]) -> Group:
    """Return the screen for a state and the samples of the last seconds."""
    lines = [line for host in status.hosts for line in (_host_line(host), *map(_tier_line, host.tiers))]
    return Group(f"{model}: {window[-1].state}; {_rates(window)}", _latencies(window), _workers(status, window), *lines)


def _rates(window: Sequence[Sample]) -> str:
    elapsed_s = sum(sample.elapsed_s for sample in window)

    def total(name: str) -> int:
        return sum(sample.counts.get(name, 0) for sample in window)

    prompt_tokens, rejected = total("prompt_tokens"), sum(sum(sample.rejected.values()) for sample in window)
    hits = f", {total('cached_tokens') / prompt_tokens:.0%} of them cached" if prompt_tokens else ""
    return (
        f"in {elapsed_s:.0f} s: {total('finished') / elapsed_s:.1f} requests/s finished, {rejected} rejected, "
        f"{prompt_tokens / elapsed_s:,.0f} prompt tokens/s{hits}, "
        f"{total('output_tokens') / elapsed_s:,.0f} output tokens/s"
    )


def _latencies(window: Sequence[Sample]) -> Table:
    table = Table("latency in ms")
    for column in ("p50, median", "p99, median", "p99, highest"):
        table.add_column(column, justify="right")
    for name, title in LATENCIES.items():
        found = [spread for sample in window if (spread := sample.latencies.get(name)) is not None]
        values = (
            (median(each.p50 for each in found), median(each.p99 for each in found), max(each.p99 for each in found))
            if found
            else ()
        )
        table.add_row(title, *(f"{value * 1e3:,.1f}" for value in values))
    return table


def _workers(status: ClusterStatus, window: Sequence[Sample]) -> Table:
    table = Table(title="workers")
    for column in ("worker", "host", "role", "pid", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("running", "waiting", "steps/s", "busy", "KV blocks"):
        table.add_column(column, justify="right")
    elapsed_s = sum(sample.elapsed_s for sample in window)
    for worker in status.workers:
        own = [(each, sample.elapsed_s) for sample in window for each in sample.workers if each.id == worker.id]
        steps, busy_s = sum(each.steps for each, _ in own), sum(each.busy_ratio * own_s for each, own_s in own)
        counts = (
            f"{worker.running:,}",
            f"{worker.waiting:,}",
            f"{steps / elapsed_s:,.1f}",
            f"{busy_s / elapsed_s:.0%}",
        )
        table.add_row(
            worker.id, worker.host, worker.role, str(worker.pid), worker.state, *counts, f"{worker.kv_blocks_used:,}"
        )
    return table


def _host_line(host: HostStatus) -> str:
    used_ratio = host.kv_blocks_used / host.kv_blocks_total
    place = f" at {host.address}" if host.address else ""
    return (
        f"{host.id}{place}, {host.state}: "
        f"{host.kv_blocks_used:,} KV blocks used ({used_ratio:.0%}), {host.kv_blocks_cached:,} cached, "
        f"{host.kv_blocks_free:,} free, of {host.kv_blocks_total:,} ({host.kv_block_tokens} tokens each)"
    )


def _tier_line(tier: TierStatus) -> str:
    alone = ", not used for now: its store fails" if tier.state != "used" else ""
    times = f"a read takes {tier.latency_s * 1e3:.1f} ms and {tier.block_load_s * 1e3:.2f} ms a block"
    return (
        f"  tier {tier.name}{alone}: {tier.kv_blocks_cached:,} KV blocks of {tier.kv_blocks_total:,}, "
        f"{tier.loaded_blocks:,} read and {tier.missed_blocks:,} missed; "
        f"{times if tier.is_measured else 'no read was timed yet'}"
    )
