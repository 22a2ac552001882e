"""`baton pool`: offer this machine's memory to the hosts of a cluster as a store of KV blocks."""

from __future__ import annotations

import argparse
import signal
import socket
from pathlib import Path

from baton.cli.serve import tell
from baton.core.errors import ConfigError
from baton.core.http_config import is_loopback
from baton.core.keys import read_shared_secret
from baton.move.memory_limits import memory_free_bytes
from baton.move.store.node import StoreNode

PORT = 8700
_BYTES_MAX = 1 << 50
_FOLDER_CHARS_MAX = 60
"""The path of a Unix socket may have 107 bytes. The socket's name in the folder takes 28 of them."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Store KV blocks for hosts, which use it as the tier pool://HOST:PORT. Ctrl-C ends it."
    add = parser.add_argument
    add("--bytes", type=float, required=True, metavar="N", help="memory to offer, such as 16e9")
    add("--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=PORT, metavar="P", help="0 takes a free one (default: %(default)s)")
    add(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="secret that clients need, and that encrypts: pool://HOST?secret_file=FILE",
    )
    add(
        "--socket-folder",
        type=Path,
        metavar="DIR",
        help="share the memory with containers that mount DIR",
    )
    add("--insecure", action="store_true", help="allow an address beyond loopback without a secret")


def run(args: argparse.Namespace) -> int:
    """Run the pool until a signal arrives. Return the exit code."""
    if not 1 <= args.bytes <= _BYTES_MAX or not 0 <= args.port <= 65535:
        bounds = f"give 1 to {_BYTES_MAX:g} bytes, and a port from 0 to 65535"
        raise ConfigError(f"--bytes is {args.bytes:g}, --port {args.port}: {bounds}")
    if args.secret_file is None and not args.insecure and not is_loopback(args.host):
        raise ConfigError(
            f"--host is {args.host}, so other machines reach this node, but it has no secret: give it --secret-file, or"
            " let every client read and write with --insecure"
        )
    folder = args.socket_folder
    if folder is not None and len(str(folder.absolute())) > _FOLDER_CHARS_MAX:
        raise ConfigError(
            f"--socket-folder {folder.absolute()} has {len(str(folder.absolute()))} characters, but may have "
            f"{_FOLDER_CHARS_MAX}; name a folder with a shorter path"
        )
    free_bytes = memory_free_bytes()
    if args.bytes > free_bytes:  # otherwise the system would kill the process when it uses the memory
        raise ConfigError(f"--bytes is {args.bytes:g}, but only {free_bytes:g} bytes of memory are free; give less")
    secret = b"" if args.secret_file is None else read_shared_secret(args.secret_file)
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno())  # wakes the main thread, even if another one gets the signal
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    node = StoreNode(
        host=args.host,
        port=args.port,
        capacity_bytes=int(args.bytes),
        secret=secret,
        socket_folder=folder,
    )
    tell(f"pool node with {int(args.bytes)} bytes at pool://{node.address}")
    wakeup.recv(1)
    node.close()
    return 0
