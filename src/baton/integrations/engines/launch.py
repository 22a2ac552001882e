"""The commands of the engine servers that Baton starts itself: `baton serve MODEL --engine vllm` or `sglang`.

The servers listen on loopback only, need a key, and publish KV events on Unix sockets in a private folder.
"""

from __future__ import annotations

import json
import random
import secrets
import shlex
import shutil
import socket
from collections.abc import Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from baton.compute.models.card import ModelCard
from baton.core.config import Config, Topology
from baton.core.engine_config import EngineConfig
from baton.core.errors import ConfigError
from baton.core.files import open_private
from baton.core.types import HostId
from baton.integrations.engines.process import EngineProcess, visible_gpus
from baton.serve.host.sizing import worker_views

_PORTS = range(20_000, 32_000)
"""Ports below those that systems give to outgoing connections, so that a port stays free while its server restarts."""
_NIXL: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def with_servers(config: Config, folder: Path) -> Config:
    """Return the configuration with an engine server on this machine for each worker of the topology.

    `folder`: private folder for sockets, which exists as long as the servers run.
    """
    views = worker_views(config.topology, HostId(""))
    servers = tuple(
        EngineConfig(
            url=f"http://127.0.0.1:{port}",
            role=view.role,
            engine="sglang" if config.engines.start == "sglang" else "vllm",
            kv_events=f"ipc://{folder}/{number}.events" if can_follow_events() else "",
            kv_events_replay=f"ipc://{folder}/{number}.replay" if can_follow_events() else "",
        )
        for number, (view, port) in enumerate(zip(views, free_ports(len(views)), strict=True))
    )
    key = config.engines.key or secrets.token_urlsafe(24)
    engines = msgspec.structs.replace(config.engines, servers=servers, key=key, start="baton")
    return msgspec.structs.replace(config, engines=engines, topology=Topology())


def can_follow_events() -> bool:
    """Return whether the package is installed that receives KV events (extras `vllm` and `sglang`)."""
    return find_spec("zmq") is not None


def free_ports(number: int, taken: Set[int] = frozenset()) -> list[int]:
    """Return ports of loopback that no process listens on, and that are not `taken` by a server to be started."""
    found: list[int] = []
    free = [port for port in _PORTS if port not in taken]
    for port in random.sample(free, len(free)):
        if len(found) == number:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


def engine_processes(config: Config, card: ModelCard, folder: Path) -> list[EngineProcess]:
    """Return the process of each server in `engines.servers`, not started. Raises ConfigError if the engine is missing.

    `folder`: the private folder of `with_servers`.
    """
    engines = config.engines
    engine = engines.servers[0].engine
    if card.format not in ("safetensors", "dummy"):
        raise ConfigError(
            f"--engine {engine} needs a folder with safetensors or a hub name, but {config.model} is {card.format}"
        )
    if config.parallel.data > 1:
        raise ConfigError(
            f"--dp {config.parallel.data} is for Baton's own workers: use engines.flags for {engines.names}"
        )
    program, *leading = shlex.split(engines.command or engine) or [""]
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"there is no program {program!r}, which starts {engines.names}: install {engines.names},"
            " or name it with --engine-command"
        )
    servers, make = engines.servers, _sglang if engine == "sglang" else _vllm
    devices = _devices(len(servers) * config.parallel.tensor * config.parallel.pipeline)
    processes: list[EngineProcess] = []
    taken = {urlsplit(server.url).port or 0 for server in servers}
    for number, (server, port) in enumerate(zip(servers, free_ports(len(servers), taken), strict=True)):
        constant, flags, environment = make(config, server, port, folder / f"{number}.yaml")
        flags = {**flags, **_shared_flags(config, card, server)}
        argv = (path, *leading, "serve", card.path, *constant, *_merged(flags, shlex.split(engines.flags)))
        name = f"{engine}-{number}"
        environment |= _visible(devices, number, config)
        processes.append(EngineProcess(name, argv, environment, start_s=config.survival.start_s))
    return processes


_Command = tuple[list[str], dict[str, object], dict[str, str]]
"""Flags without values, flags with values (None: not given), and variables of a server."""


def _shared_flags(config: Config, card: ModelCard, server: EngineConfig) -> dict[str, object]:
    """Return the flags that all engines have."""
    return {
        "--host": "127.0.0.1",
        "--port": server.url.rpartition(":")[2],
        "--dtype": None if config.dtype == "auto" else config.dtype,
        "--load-format": "dummy" if card.format == "dummy" else None,
        "--tensor-parallel-size": config.parallel.tensor if config.parallel.tensor > 1 else None,
        "--pipeline-parallel-size": config.parallel.pipeline if config.parallel.pipeline > 1 else None,
        "--decode-context-parallel-size": config.parallel.context if config.parallel.context > 1 else None,
        "--kv-events-config": json.dumps(_events(server)) if server.kv_events else None,
    }


def _merged(flags: dict[str, object], own: list[str]) -> list[str]:
    """Return the flags of a server. Those of `engines.flags` come last, so they replace earlier ones."""
    given = {flag.partition("=")[0] for flag in own}
    made = [
        text for flag, value in flags.items() if value is not None and flag not in given for text in (flag, str(value))
    ]
    return [*made, *own]


def _vllm(config: Config, server: EngineConfig, side_port: int, _settings: Path) -> _Command:
    flags: dict[str, object] = {
        "--max-num-seqs": config.batch.requests_max,
        "--max-model-len": config.context_tokens or None,
        "--kv-transfer-config": json.dumps(_connector(config))
        if config.engines.store or server.role != "mixed"
        else None,
    }
    environment = {"VLLM_API_KEY": config.engines.key, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    experts = ["--enable-expert-parallel"] if config.parallel.experts else []
    return ["--enable-scale-out", "--disable-uvicorn-access-log", *experts], flags, environment


def _sglang(config: Config, server: EngineConfig, bootstrap_port: int, settings: Path) -> _Command:
    """Return the command of an SGLang server. Its key is in a file, because other users see flags."""
    with open_private(settings, "wb") as file:
        file.write(json.dumps({"api-key": config.engines.key}).encode())
    is_apart = server.role != "mixed"
    flags: dict[str, object] = {
        "--config": settings,
        "--page-size": config.kv.block_tokens,
        "--max-running-requests": config.batch.requests_max,
        "--context-length": config.context_tokens or None,
        "--ep-size": config.parallel.tensor if config.parallel.experts else None,
        "--disaggregation-mode": server.role if is_apart else None,
        "--disaggregation-bootstrap-port": bootstrap_port if is_apart else None,
    }
    return ["--enable-metrics", "--incremental-streaming-output"], flags, {}


def _connector(config: Config) -> dict[str, object]:
    if not config.engines.store:
        return _NIXL
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": config.engines.store},
    }


def _events(server: EngineConfig) -> dict[str, object]:
    enabled = {"enable_kv_cache_events": True} if server.engine == "vllm" else {}
    return {**enabled, "publisher": "zmq", "endpoint": server.kv_events, "replay_endpoint": server.kv_events_replay}


def _devices(number: int) -> Sequence[str]:
    """Return the GPUs of this machine if there are `number` of them. Else empty: servers share what there is."""
    devices = visible_gpus()
    return devices if len(devices) >= number else ()


def _visible(devices: Sequence[str], number: int, config: Config) -> dict[str, str]:
    """Return the variable that gives the server with this number GPUs of its own."""
    ranks = config.parallel.tensor * config.parallel.pipeline
    mine = devices[number * ranks : (number + 1) * ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
