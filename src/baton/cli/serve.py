"""`baton serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from baton.cli.foreign_flags import DTYPES
from baton.cli.json_logs import log_as_json
from baton.cli.key_flags import ADMIN_KEY, API_KEY, ENGINE_KEY, JOIN_KEY, empty_variables, key_lines, take_variable
from baton.cli.output import warn
from baton.cli.serve_flags import add_access, add_api, add_computing, add_fleet, add_sizes
from baton.core.config import Config, Topology, load
from baton.core.engine_config import EnginePodsConfig, engine_of
from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.core.http_config import HttpConfig
from baton.core.keys import read_keys
from baton.core.kv_config import TierConfig
from baton.core.model_tables import model_configs
from baton.core.served_model import ServedModelConfig
from baton.move.ipc.tls import ServerTls

Section = TypeVar("Section", bound=msgspec.Struct)
_NEVER_EMPTY = ("keys", "admin_key", "tls_cert", "tls_key")
"""Flags that must not be empty: an unset shell variable would otherwise silently turn off a key or a certificate."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command. A flag that is not given takes its value from --config, or else the default."""
    parser.description = "Serve a model over HTTP. Without arguments: SmolLM2-135M, 1 prefill + 1 decode, port 8000."
    parser.add_argument(
        "models",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="a folder with safetensors, a .gguf file, a hub name, or smollm2-135m (default) or hash (no weights); "
        "or several",
    )
    parser.add_argument(
        "--model", dest="model_flag", metavar="MODEL", help="the same as MODEL, for commands written for vLLM"
    )
    parser.add_argument(
        "--prefill", type=int, metavar="N", help="prefill workers; a role that is not given has none (default: 1)"
    )
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers (default: 1)")
    parser.add_argument("--mixed", type=int, metavar="N", help="workers for both prefill and decode (default: 0)")
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="wait for N hosts to join; without a role, this machine then has no workers",
    )
    parser.add_argument("--hosts-port", type=int, metavar="P", help="port for joining hosts (default: any)")
    add_fleet(parser)
    parser.add_argument("--host", metavar="H", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="P", help="port to listen on; 0 takes a free one (default: 8000)")
    add_computing(parser)
    add_sizes(parser)
    add_api(parser)
    parser.add_argument(
        "--queue-s", type=float, metavar="S", help="reject requests that wait longer than S s (default: 10)"
    )
    parser.add_argument("--log", metavar="FILE", help="write every decision to FILE, for `baton replay`")
    parser.add_argument("--log-format", choices=("text", "json"), help="format of printed lines (default: text)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; see docs/config.md")
    add_access(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit code."""
    config = configuration(args)
    say = tell
    if config.log_format == "json":
        log_as_json()
        say = logging.getLogger("baton.server").info
    from baton.serve.live.several_models import assemble_models  # late, so that a wrong flag is reported at once
    from baton.serve.service import serve

    if config.launcher.use == "ray":
        from baton.integrations.ray.launcher import RayLauncher  # an optional part

        launcher = RayLauncher(config, say)
        models = [replace(parts, launcher=launcher) for parts in assemble_models(config)]
        return event_loop()(serve(config, models, tell=say))
    if not config.engines.is_used and config.engines.start == "baton":
        return event_loop()(serve(config, assemble_models(config), tell=say))
    from baton.integrations.engines.fleet import EngineFleet  # an optional part
    from baton.integrations.engines.launch import can_follow_events, engine_processes, with_servers
    from baton.integrations.engines.pods import EnginePods
    from baton.integrations.kubernetes import KubernetesApi

    if config.engines.pods.selector:
        pods = EnginePods.of(config.engines.pods, KubernetesApi())
        models = assemble_models(config)
        return event_loop()(serve(config, models, tell=say, engines=EngineFleet(models[0], say, pods=pods)))

    with TemporaryDirectory(prefix="baton-engines-") as folder:
        is_starting = not config.engines.servers
        if is_starting and not can_follow_events():
            extra = f"pip install 'baton[{config.engines.start}]'"
            say(f"KV events of the servers are not followed, because pyzmq is not installed: {extra}")
        config = with_servers(config, Path(folder)) if is_starting else config
        models = assemble_models(config)
        processes = engine_processes(config, models[0].card, Path(folder)) if is_starting else ()
        return event_loop()(serve(config, models, tell=say, engines=EngineFleet(models[0], say, processes)))


def configuration(args: argparse.Namespace) -> Config:
    """Return the configuration of the file, overridden by the flags. Raises ConfigError with every problem."""
    config = read_config(args.config) if args.config is not None else Config()
    topology = config.topology
    hosts = _with(config.hosts, {"expected": args.hosts, "port": args.hosts_port})
    if any(count is not None for count in (args.prefill, args.decode, args.mixed)):
        topology = Topology(prefill=args.prefill or 0, decode=args.decode or 0, mixed=args.mixed or 0)
        if topology == Topology() and not hosts.expected:
            raise ConfigError(
                "--prefill, --decode and --mixed are all 0: there would be no worker; give at least one, or --hosts"
            )
    launcher = _with(config.launcher, {"use": args.launcher})
    parallel = _with(config.parallel, _parallel(args))
    if launcher.use == "ray":
        gpus = (
            parallel.tensor * parallel.pipeline * parallel.data
            if (args.device or config.device).startswith("cuda")
            else 0
        )
        launcher = launcher.with_groups(topology.counts(), cpus=args.threads or config.threads or 1, gpus=gpus)
        expected = sum(group.hosts for group in launcher.groups)
        topology, hosts = Topology(), msgspec.structs.replace(hosts, expected=expected)
    kv = {"dtype": args.kv_dtype, "blocks": args.kv_blocks, "block_tokens": args.block_tokens}
    top = {
        name: vars(args)[name]
        for name in (
            "load_format",
            "attention_backend",
            "device",
            "weights",
            "threads",
            "context_tokens",
            "log",
            "log_format",
        )
    }
    config = _with(
        config,
        {
            **top,
            "served_name": args.served_name[0] if args.served_name else None,
            "served_aliases": tuple(args.served_name[1:]) if args.served_name else None,
            **_models(args, config),
            "dtype": _dtype(args.dtype),
            "topology": topology,
            "hosts": hosts,
            "engines": _with(config.engines, _engines(args, config.engines.pods)),
            "launcher": launcher,
            "parallel": parallel,
            "kv": _with(config.kv, kv),
            "tiers": tuple(TierConfig(url=url) for url in args.tier) if args.tier else None,
            "batch": _with(config.batch, {"step_tokens_max": args.step_tokens, "requests_max": args.batch_requests}),
            "http": _with(config.http, _http(args)),
            "batches": _with(config.batches, {"folder": args.batch_folder}),
            "limits": _with(config.limits, {"queue_s": args.queue_s}),
        },
    )
    problems = config.problems() + config.lacks() + _without_effect(args, config)
    if config.models and not problems:
        model_configs(config)
    if config.http.key_file and not problems:
        read_keys(Path(config.http.key_file))
    if config.http.tls_cert and not problems:
        ServerTls(Path(config.http.tls_cert), Path(config.http.tls_key))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _without_effect(args: argparse.Namespace, config: Config) -> list[str]:
    """Return what is wrong with flags that need another one, which would otherwise change nothing."""
    found: list[str] = []
    http = config.http
    if not http.admin_port and (args.admin_host is not None or http.admin_host != HttpConfig().admin_host):
        found.append(
            f"http.admin_host is {http.admin_host}, but http.port serves the admin routes: give them --admin-port P"
        )
    given = {"command": args.engine_command, "flags": args.engine_flags, "store": args.engine_store}
    names = [f"--engine-{name}" for name, value in given.items() if value is not None]
    if names and config.engines.start == "baton":
        found.append(
            f"{', '.join(names)}: only for servers that Baton starts; add --engine vllm or sglang, without --engine-url"
        )
    return found


def _parallel(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "tensor": args.tp,
        "pipeline": args.pp,
        "context": args.dcp,
        "data": args.dp,
        "experts": args.enable_expert_parallel,
        "overlap_tokens_min": args.enable_dbo,
    }


def _models(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Return the settings of the models of MODEL or --model, which replace those of the file. Empty: not given."""
    names: list[str] = args.models or ([args.model_flag] if args.model_flag else [])
    if args.model_flag and names != [args.model_flag]:
        raise ConfigError(f"MODEL is {' '.join(names)} and --model is {args.model_flag}: give one of them")
    if args.lora_modules:
        return _with_adapters(args, names or [table.model for table in config.models] or [config.model])
    if not names:
        return {}
    if len(names) == 1:
        return {"model": names[0], "models": ()}
    return {"model": Config().model, "models": tuple(ServedModelConfig(model=name) for name in names)}


def _with_adapters(args: argparse.Namespace, bases: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a base model and of its adapters, as models beside each other."""
    if len(bases) > 1:
        raise ConfigError(f"--lora-modules adapts one model, and there are {len(bases)}; use `adapter` in [[models]]")
    tables = [ServedModelConfig(model=bases[0], name=args.served_name[0] if args.served_name else "")]
    for given in args.lora_modules:
        name, equals, folder = given.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--lora-modules {given}: give NAME=FOLDER, the folder of an adapter that PEFT has saved")
        tables.append(ServedModelConfig(model=bases[0], name=name, adapter=folder))
    return {"model": Config().model, "served_name": "", "models": tuple(tables)}


def _dtype(asked: str | None) -> str | None:
    """Return the precision. Says if it is another one than that which was asked for."""
    if asked not in DTYPES:
        return asked
    if DTYPES[asked] == "bfloat16":
        warn([f"--dtype {asked}: Baton does not compute in float16; bfloat16, of the same size, is taken"])
    return DTYPES[asked]


def _http(args: argparse.Namespace) -> dict[str, Any]:
    """Return the HTTP settings from flags, key files and the environment. A setting that is not given is None."""
    empty = [f"--{name.replace('_', '-')}" for name in _NEVER_EMPTY if vars(args)[name] == ""]
    empty += empty_variables(API_KEY, ADMIN_KEY, JOIN_KEY)
    if empty:
        raise ConfigError(f"{', '.join(empty)}: the value is empty, which would leave the server open; give one")
    keys = [*(args.api_key or []), *(key_lines(args.api_key_file) if args.api_key_file is not None else [])]
    in_environment = {name: take_variable(name) for name in (API_KEY, ADMIN_KEY, JOIN_KEY)}
    if not keys and in_environment[API_KEY]:
        keys = [in_environment[API_KEY]]
    repeated = {"api_keys": keys, "allowed_hosts": args.allowed_host, "cors_origins": args.cors_origin}
    return {
        "host": args.host,
        "port": args.port,
        "key_file": args.keys,
        "admin_key": args.admin_key or in_environment[ADMIN_KEY] or None,
        "join_key": in_environment[JOIN_KEY] or None,
        "tls_cert": args.tls_cert,
        "tls_key": args.tls_key,
        "admin_host": args.admin_host,
        "admin_port": args.admin_port,
        "insecure": args.insecure,
        "metrics_names": args.metrics_names,
        "otlp": args.otlp,
        "strict_api": args.strict_api,
        **{name: tuple(values) if values else None for name, values in repeated.items()},
    }


def _engines(args: argparse.Namespace, pods: EnginePodsConfig) -> dict[str, Any]:
    """Return the engine settings from flags, the key file and the environment. A setting that is not given is None."""
    key = key_lines(args.engine_key_file)[0] if args.engine_key_file is not None else take_variable(ENGINE_KEY)
    urls = args.engine_url or ()
    engine = args.engine if args.engine in ("sglang", "openai") else "vllm"
    servers = tuple(engine_of(text, engine) for text in urls) or None
    if args.engine == "openai" and not urls:
        raise ConfigError("--engine openai starts no server: name running ones with --engine-url URL")
    started = {
        "start": "baton" if urls and args.engine else args.engine,
        "command": args.engine_command,
        "flags": args.engine_flags,
        "store": args.engine_store,
    }
    return {"servers": servers, "pods": _with(pods, {"selector": args.engine_pods}), "key": key or None, **started}


def _with(struct: Section, given: Mapping[str, Any]) -> Section:
    """Return a copy of the struct with the given values. A value of None keeps the struct's own."""
    return msgspec.structs.replace(struct, **{name: value for name, value in given.items() if value is not None})


def read_config(path: Path) -> Config:
    """Return the configuration of a file. Raises ConfigError with every problem."""
    with in_file(path, "the configuration"):
        return load(path.read_text(encoding="utf-8"))


def event_loop() -> Any:  # noqa: ANN401
    """Return the function that runs a coroutine: `uvloop.run`, or on Windows `asyncio.run`."""
    if sys.platform == "win32":
        return asyncio.run
    import uvloop  # not on Windows

    return uvloop.run


def tell(text: str) -> None:
    """Print a line. Errors of standard output are ignored, so that the server survives `baton serve | head`."""
    with contextlib.suppress(OSError):
        print(text, flush=True)  # noqa: T201
