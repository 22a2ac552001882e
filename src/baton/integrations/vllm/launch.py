"""The commands of the vLLM servers that Baton starts itself: `baton serve MODEL --engine vllm`.

The servers listen on loopback only, need a key, and publish KV events on Unix sockets in a private folder.
"""

from __future__ import annotations

import json
import random
import secrets
import shlex
import shutil
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from baton.compute.models.card import ModelCard
from baton.core.config import Config, Topology
from baton.core.engine_config import EngineConfig
from baton.core.errors import ConfigError
from baton.core.types import HostId
from baton.integrations.engines.process import EngineProcess, visible_gpus
from baton.serve.host.sizing import worker_views

_PORTS = range(20_000, 32_000)
"""Ports below those that systems give to outgoing connections, so that a port stays free while its server restarts."""
_NIXL: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def with_servers(config: Config, folder: Path) -> Config:
    """Return the configuration with a vLLM server on this machine for each worker of the topology.

    `folder`: private folder for sockets, which exists as long as the servers run.
    """
    views = worker_views(config.topology, HostId(""))
    servers = tuple(
        EngineConfig(
            url=f"http://127.0.0.1:{port}",
            role=view.role,
            kv_events=f"ipc://{folder}/{number}.events" if can_follow_events() else "",
            kv_events_replay=f"ipc://{folder}/{number}.replay" if can_follow_events() else "",
        )
        for number, (view, port) in enumerate(zip(views, free_ports(len(views)), strict=True))
    )
    key = config.engines.key or secrets.token_urlsafe(24)
    engines = msgspec.structs.replace(config.engines, servers=servers, key=key, start="baton")
    return msgspec.structs.replace(config, engines=engines, topology=Topology())


def can_follow_events() -> bool:
    """Return whether the extra `vllm` is installed, which receives KV events."""
    return find_spec("zmq") is not None


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that no process listens on."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == number:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


def engine_processes(config: Config, card: ModelCard) -> list[EngineProcess]:
    """Return the process of each server in `engines.servers`, not started. Raises ConfigError if there is no vLLM."""
    if card.format not in ("safetensors", "dummy"):
        raise ConfigError(
            f"--engine vllm needs a folder with safetensors or a hub name, but {config.model} is {card.format}"
        )
    program, *leading = shlex.split(config.engines.command) or [""]
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"there is no program {program!r}, which starts vLLM: install vLLM, or name it with --engine-command"
        )
    devices = _devices(len(config.engines.servers) * config.parallel.tensor * config.parallel.pipeline)
    side_ports = free_ports(len(config.engines.servers))
    return [
        EngineProcess(
            f"vllm-{number}",
            (path, *leading, "serve", card.path, *_flags(config, card, server)),
            {
                "VLLM_API_KEY": config.engines.key,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_ports[number]),
                **_visible(devices, number, config),
            },
            start_s=config.survival.start_s,
        )
        for number, server in enumerate(config.engines.servers)
    ]


def _flags(config: Config, card: ModelCard, server: EngineConfig) -> list[str]:
    """Return the flags of a server. Those of `engines.flags` come last, so they replace earlier ones."""
    own = shlex.split(config.engines.flags)
    given = {flag.partition("=")[0] for flag in own}
    parallel, is_apart = config.parallel, server.role != "mixed"
    flags: dict[str, object] = {
        "--host": "127.0.0.1",
        "--port": server.url.rpartition(":")[2],
        "--max-num-seqs": config.batch.requests_max,
        "--max-model-len": config.context_tokens or None,
        "--dtype": None if config.dtype == "auto" else config.dtype,
        "--load-format": "dummy" if card.format == "dummy" else None,
        "--tensor-parallel-size": parallel.tensor if parallel.tensor > 1 else None,
        "--pipeline-parallel-size": parallel.pipeline if parallel.pipeline > 1 else None,
        "--kv-transfer-config": json.dumps(_connector(config)) if config.engines.store or is_apart else None,
        "--kv-events-config": json.dumps(_events(server)) if server.kv_events else None,
    }
    made = [
        text for flag, value in flags.items() if value is not None and flag not in given for text in (flag, str(value))
    ]
    return ["--enable-scale-out", "--disable-uvicorn-access-log", *made, *own]


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
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": server.kv_events,
        "replay_endpoint": server.kv_events_replay,
    }


def _devices(number: int) -> Sequence[str]:
    """Return the GPUs of this machine if there are `number` of them. Else empty: servers share what there is."""
    devices = visible_gpus()
    return devices if len(devices) >= number else ()


def _visible(devices: Sequence[str], number: int, config: Config) -> dict[str, str]:
    """Return the variable that gives the server with this number GPUs of its own."""
    ranks = config.parallel.tensor * config.parallel.pipeline
    mine = devices[number * ranks : (number + 1) * ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
