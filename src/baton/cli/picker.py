"""`baton picker`: pick servers for the requests of an Envoy proxy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from baton.cli.key_flags import ENGINE_KEY, key_lines, take_variable
from baton.cli.listening import add_listening, listening_address, listening_problems, serve_until_signal
from baton.cli.serve import event_loop, read_config, tell
from baton.core.config import Config
from baton.core.engine_config import EngineConfig, engine_of
from baton.core.errors import ConfigError
from baton.core.types import Role
from baton.integrations.gateway.build import build_picker
from baton.integrations.gateway.kubernetes import InferencePool
from baton.integrations.gateway.picker import Picker
from baton.integrations.gateway.pool import FixedPool, Pool, PoolSource
from baton.integrations.gateway.server import Listening, serve_picker
from baton.integrations.kubernetes import KubernetesApi

PORT = 9002
DESCRIPTION = "Serve an endpoint picker: docs/integrations/gateway.md."


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--engine-url", action="append", metavar="[ROLE=]URL", help="a server of the pool (repeatable)")
    add("--pool", metavar="NAMESPACE/NAME", help="an InferencePool of this cluster")
    add("--engine-key-file", type=Path, metavar="FILE", help=f"their key (default: {ENGINE_KEY})")
    add("--config", type=Path, metavar="FILE", help="a TOML file; see docs/config.md")
    add("--log", metavar="FILE", help="write every decision to FILE, for `baton replay`")
    add_listening(parser, PORT)
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="private key of --tls-cert (PEM)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit code."""
    config = _configuration(args)
    source: PoolSource = FixedPool(_roles(config.engines.servers))
    if args.pool:
        source = InferencePool.of(args.pool, KubernetesApi())
    picker = build_picker(config)
    pool = Pool(source, picker, tell, check_s=config.engines.check_s)
    pool.key, pool.silent_s = config.engines.key, config.engines.silent_s
    event_loop()(_serve(Listening(listening_address(args), args.tls_cert, args.tls_key), picker, pool))
    return 0


def _configuration(args: argparse.Namespace) -> Config:
    config = read_config(args.config) if args.config is not None else Config()
    servers = tuple(map(engine_of, args.engine_url)) if args.engine_url else config.engines.servers
    key = key_lines(args.engine_key_file)[0] if args.engine_key_file is not None else take_variable(ENGINE_KEY)
    engines = replace(config.engines, servers=servers, key=key or config.engines.key)
    problems = engines.problems()
    if args.pool and servers:
        problems.append("--pool and --engine-url name two pools: leave one of them out")
    if not args.pool and not servers:
        problems.append("the pool has no server: give --engine-url URL for each, or --pool NAMESPACE/NAME")
    problems += listening_problems(args, "ask for picks")
    if (args.tls_cert is None) != (args.tls_key is None):
        problems.append("--tls-cert and --tls-key belong together: give both or none")
    if problems:
        raise ConfigError("\n".join(problems))
    return replace(config, engines=engines, log=args.log or config.log)


def _roles(servers: tuple[EngineConfig, ...]) -> Mapping[str, Role]:
    """Return the roles of servers by `IP:PORT`, as a proxy needs their addresses. Raises ConfigError."""
    roles: dict[str, Role] = {}
    for server in servers:
        parts = urlsplit(server.url)
        try:
            if parts.scheme != "http":
                raise ValueError(f"its scheme is {parts.scheme}")
            ip_address(parts.hostname or "")
        except ValueError as error:
            raise ConfigError(f"--engine-url {server.url}: write http://IP:PORT, as proxies do ({error})") from error
        host = parts.hostname if ":" not in str(parts.hostname) else f"[{parts.hostname}]"
        roles[f"{host}:{parts.port or 80}"] = server.role
    return roles


async def _serve(listening: Listening, picker: Picker, pool: Pool) -> None:
    tls = "" if listening.certificate is None else ", with TLS"
    said = partial(tell, f"the endpoint picker listens on {listening.address}{tls}")
    following = asyncio.create_task(pool.run())
    try:
        await serve_until_signal(serve_picker(listening, picker, lambda: pool.is_known, said))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        picker.close()
