"""`baton host`: join a server with this machine's workers and memory."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from typing import get_args

from baton.cli.key_flags import API_KEY, JOIN_KEY, add_client_key, client_key
from baton.cli.serve import event_loop, tell
from baton.cli.serve_flags import add_parallel
from baton.core.config import DEVICE, Topology
from baton.core.errors import ConfigError, TransferError
from baton.core.kv_config import KVDtypeChoice, TierConfig
from baton.move.transport.tcp import split_address, with_port
from baton.serve.host.agent import Agent, HostOptions
from baton.serve.host.sizing import raise_files_max
from baton.serve.host.tier_opening import check_tiers

DESCRIPTION = """Join a server with this machine's workers and memory. Ctrl-C leaves it: requests continue elsewhere.

Exit code: 0 after a signal; 1 if no server accepted this host within --join-wait-s, or no worker can be kept alive; 2
for bad arguments, or if the server rejects this host permanently."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--join",
        required=True,
        metavar="URL",
        help="the server, such as http://10.0.0.1:8000, or etcd://10.0.0.1:2379/NAME",
    )
    add("model", nargs="?", default="", metavar="MODEL", help="the model on this machine (default: as on the server)")
    add("--name", metavar="NAME", help="name of this host on the server (default: its host name)")
    add("--prefill", type=int, metavar="N", help="prefill workers; a role that is not given has none (default: 1)")
    add("--decode", type=int, metavar="N", help="decode workers (default: 1)")
    add("--mixed", type=int, metavar="N", help="workers for both prefill and decode (default: 0)")
    add("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N (default: a GPU if there is one)")
    add(
        "--kind",
        default="",
        metavar="NAME",
        help="kind of its workers in the server's cost.kinds (default: the first)",
    )
    add("--threads", type=int, default=0, metavar="N", help="threads of each worker (default: cores / workers)")
    add_parallel(parser, default="as the server's")
    add("--kv-blocks", type=int, default=0, metavar="N", help="KV blocks of this host (default: 2 GiB)")
    add("--block-tokens", type=int, default=0, metavar="N", help="tokens in a KV block (default: as the server's)")
    add(
        "--kv-dtype",
        choices=get_args(KVDtypeChoice),
        help="precision of KV on this host (default: as the server's; another one needs hosts.lossy on the server)",
    )
    add(
        "--tier",
        action="append",
        default=[],
        metavar="URL",
        help="keep KV of this host in its own store: file:///var/cache/kv?bytes=100e9 (repeatable, the fastest first)",
    )
    add(
        "--listen",
        default="",
        metavar="ADDR",
        help="address from which other hosts pull KV blocks (default: the address that reaches the server)",
    )
    add("--advertise", default="", metavar="ADDR", help="address at which others reach --listen (default: the same)")
    add_client_key(parser, f"{JOIN_KEY} or {API_KEY}")
    add(
        "--join-wait-s",
        type=float,
        default=300.0,
        metavar="T",
        help="seconds to retry while the server is unreachable or accepts no host (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Join the server and run the host until a signal arrives. Return the exit code.

    If an operator restarts the host (`baton restart --hosts`), this process replaces itself with the program that is
    installed by then.
    """
    environment = dict(os.environ)
    counts = (args.prefill, args.decode, args.mixed)
    if any(count is not None and count < 0 for count in counts):
        raise ConfigError("--prefill, --decode and --mixed must be 0 or more")
    if any(count is not None for count in counts) and not any(counts):
        raise ConfigError("--prefill, --decode and --mixed are all 0: this host would do nothing; give at least one")
    for flag, value in (
        ("--threads", args.threads),
        ("--kv-blocks", args.kv_blocks),
        ("--block-tokens", args.block_tokens),
        ("--join-wait-s", args.join_wait_s),
    ):
        if value < 0:
            raise ConfigError(f"{flag} is {value}, but must be 0 or more")
    for flag, value in (("--tp", args.tp), ("--pp", args.pp)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}, but must be 1 or more")
    if DEVICE.fullmatch(args.device) is None:
        raise ConfigError(f"--device is {args.device!r}, but must be auto, cpu, cuda or cuda:N")
    tiers = tuple(TierConfig(url=url) for url in args.tier)
    check_tiers(tiers)
    options = HostOptions(
        url=args.join,
        name=args.name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64],
        model=args.model,
        topology=Topology(prefill=args.prefill or 0, decode=args.decode or 0, mixed=args.mixed or 0),
        tensor=args.tp,
        pipeline=args.pp,
        device=args.device,
        kind=args.kind,
        threads=args.threads,
        kv_blocks=args.kv_blocks,
        block_tokens=args.block_tokens,
        kv_dtype=args.kv_dtype,
        tiers=tiers,
        listen=args.listen,
        advertise=args.advertise,
        api_key=client_key(args, JOIN_KEY, API_KEY),
        join_wait_s=args.join_wait_s,
    )
    check_address(args.listen)
    raise_files_max()
    agent = Agent(options, tell=tell)
    code: int = event_loop()(agent.run())
    if agent.restarts and not code:
        tell("starting again")
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    return code


def check_address(listen: str) -> None:
    """Raise ConfigError if this machine cannot listen on the address. Without it, `baton host` retries in vain."""
    if not listen:
        return
    try:
        name, _port = split_address(with_port(listen, 0))
        family, kind, protocol, _name, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
    except (OSError, TransferError) as error:
        raise ConfigError(
            f"cannot listen on {listen}: {error}; give --listen an address of this machine, or leave it out"
        ) from error
