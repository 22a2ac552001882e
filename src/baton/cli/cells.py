"""`baton cells`: route requests to several servers."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import toml
from msgspec.structs import replace

from baton.cli.key_flags import ADMIN_KEY, take_variable
from baton.cli.serve import event_loop, read_config, tell
from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.core.http_config import is_loopback
from baton.core.validation import out_of_range
from baton.decide.control.cell_router import Cell, CellRules
from baton.serve.cells.app import serve_cells

PORT = 8080
DESCRIPTION = "Route requests to several servers, the cells of a fleet: docs/integrations/cells.md."
_RULES = CellRules()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("cells", nargs="+", metavar="URL[=WEIGHT]", help="a cell's server, and its relative size (default 1)")
    add("--host", metavar="ADDR", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, metavar="P", help=f"port to listen on (default: {PORT})")
    add("--insecure", action="store_true", help="allow an address beyond loopback: clients need no key")
    add("--load-ratio", type=float, default=_RULES.load_ratio, metavar="R",
        help="most requests of a cell relative to its fair share (default: %(default)s)")  # fmt: skip
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="sections http, limits, survival and engines (checks) of docs/config.md",
    )
    add("--log", metavar="FILE", help="write every decision to FILE, for `baton replay`")
    add("--tls-cert", metavar="FILE", help="certificate chain (PEM)")
    add("--tls-key", metavar="FILE", help="private key of --tls-cert (PEM)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit code."""
    config = read_config(args.config) if args.config is not None else Config()
    given = {"tls_cert": args.tls_cert, "tls_key": args.tls_key, "admin_key": take_variable(ADMIN_KEY)}
    given = {name: value for name, value in given.items() if value}
    http = replace(config.http, host=args.host or config.http.host, port=_port(args, config), **given)
    config = replace(config, http=http, log=args.log or config.log)
    rules = replace(_RULES, load_ratio=args.load_ratio)
    cells, problems = _cells(args.cells)
    problems += out_of_range(rules) + config.problems()
    if not (is_loopback(http.host) or args.insecure or http.insecure or http.admin_key):
        problems.append(
            f"--host is {http.host}, so other machines may drain cells: set {ADMIN_KEY}, or give --insecure"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return event_loop()(serve_cells(config, cells, rules, tell=tell))


def _port(args: argparse.Namespace, config: Config) -> int:
    """Return the port of the flag, or of the file if it has one, else `PORT`: that of a server is another one."""
    if args.port is not None:
        return args.port
    is_given = args.config is not None and "port" in toml.decode(args.config.read_bytes()).get("http", {})
    return config.http.port if is_given else PORT


def _cells(given: list[str]) -> tuple[list[Cell], list[str]]:
    """Return the cells, and what is wrong with them."""
    cells: dict[str, Cell] = {}
    problems: list[str] = []
    for text in given:
        url, _, weight = text.partition("=")
        url = url.rstrip("/")
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path == "" and parts.port != 0
            size = float(weight or 1)
        except ValueError:
            is_url, size = False, 0.0
        if not is_url or not 0.01 <= size <= 100:
            problems.append(
                f"{text}: write http://HOST:PORT, or http://HOST:PORT=WEIGHT with a weight from 0.01 to 100"
            )
        elif url in cells:
            problems.append(f"the cell {url} is given twice: leave one out")
        cells[url] = Cell(url, size)
    return list(cells.values()), problems
