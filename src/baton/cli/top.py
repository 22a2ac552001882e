"""`baton top`: show a server's workers and KV blocks, live in the terminal."""

from __future__ import annotations

import argparse
import sys
import threading

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from baton.cli.ask_server import URL, add_model, ask, check_url, of_model
from baton.cli.key_flags import add_client_key, client_key
from baton.core.errors import BatonError, ConfigError
from baton.serve.live.status import ClusterStatus, HostStatus, TierStatus


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], purpose: str) -> None:
    parser = subparsers.add_parser(
        "top", help=purpose, description="Show a server's workers and KV blocks, live. Ctrl-C ends it."
    )
    parser.set_defaults(run=run)
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
    console, key, path = Console(), client_key(args), of_model("/cluster", args.model)
    try:
        if args.once:
            console.print(_screen(_read_status(args.url, path, key)))
            return 0
        with Live(_screen(_read_status(args.url, path, key)), console=console, auto_refresh=False) as live:
            pause = threading.Event()
            while not pause.wait(args.interval_s):
                live.update(_screen(_read_status(args.url, path, key)), refresh=True)
    except KeyboardInterrupt:
        return 0
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _read_status(url: str, path: str, api_key: str | None) -> ClusterStatus:
    try:
        return msgspec.json.decode(ask(url, path, api_key), type=ClusterStatus)
    except msgspec.DecodeError as error:
        raise BatonError(f"there is no Baton server at {url}: {error}; start one with `baton serve`") from error


def _screen(status: ClusterStatus) -> Group:
    table = Table(title="workers")
    for column in ("worker", "host", "role", "pid", "state"):
        table.add_column(column)
    for column in ("running", "waiting", "KV blocks"):
        table.add_column(column, justify="right")
    for worker in status.workers:
        counts = (worker.running, worker.waiting, worker.kv_blocks_used)
        table.add_row(
            worker.id, worker.host, worker.role, str(worker.pid), worker.state, *(f"{count:,}" for count in counts)
        )
    lines = [line for host in status.hosts for line in (_host_line(host), *map(_tier_line, host.tiers))]
    return Group(table, *lines)


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
    return (
        f"  tier {tier.name}{alone}: {tier.kv_blocks_cached:,} KV blocks of {tier.kv_blocks_total:,}, "
        f"{tier.loaded_blocks:,} read and {tier.missed_blocks:,} missed; "
        f"a read takes {tier.latency_s * 1e3:.1f} ms and {tier.block_load_s * 1e3:.2f} ms a block"
    )
