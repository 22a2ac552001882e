"""`baton ray up`: a server on a node of Ray, in an actor that outlives the command."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from baton.core.errors import BatonError, ConfigError
from baton.core.files import open_private
from baton.integrations.ray.cluster import NAMESPACE, connect
from baton.integrations.ray.host_actor import start_baton

_KEPT_LINES = 20
_NAME = "baton-server"
_RESTART_S = 5.0
"""Pause before a server that did not become ready is started again."""


class ServerActor:
    """Runs `baton serve --launcher ray`. Its output goes to the log of the actor.

    If its node is lost, or the server fails, Ray starts the actor again.
    """

    def __init__(self, config: str, environment: Mapping[str, str]) -> None:
        """`config`: the text of the configuration. `environment`: added to that of the node, for keys."""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._answered = threading.Event()
        self._is_ready = False
        self._is_restart = bool(import_module("ray").get_runtime_context().was_current_actor_reconstructed)
        self._stopping = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        path = Path(self._folder.name) / "baton.toml"
        with open_private(path, "wb") as file:
            file.write(config.encode())
        self._process = start_baton(("serve", "--config", str(path), "--launcher", "ray"), environment)
        threading.Thread(target=self._follow, daemon=True).start()

    def answer(self) -> tuple[bool, list[str]]:
        """Wait until the server is ready or has ended. Return whether it is ready, and its last lines."""
        self._answered.wait()
        return self._is_ready, list(self._lines)

    def stop(self) -> int:
        """End the server after its running requests. Return its exit code."""
        self._stopping.set()
        self._process.terminate()
        return self._process.wait()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            self._lines.append(line.rstrip())
            if line.startswith("ready: "):
                self._is_ready = True
                self._answered.set()
        was_ready, self._is_ready = self._is_ready, False
        self._answered.set()
        # `start_server` reports a failed first start to its caller
        has_failed = self._process.wait() != 0 and (was_ready or self._is_restart)
        if has_failed and not self._stopping.wait(0 if was_ready else _RESTART_S):
            os._exit(1)  # Ray starts the actor again


def start_server(address: str, config: str, environment: Mapping[str, str]) -> list[str]:
    """Start a server on the cluster and wait until it is ready. Return its last lines of output.

    Raises ConfigError if there is no cluster, or a server runs already, and BatonError if the server ends.
    """
    ray = connect(address)
    if any(actor["name"] == _NAME for actor in ray.util.list_named_actors(all_namespaces=True)):
        raise ConfigError("a server runs on this cluster already: end it with `baton ray down`")
    options = {"name": _NAME, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 1, "max_restarts": -1}
    actor = ray.remote(ServerActor).options(**options).remote(config, dict(environment))
    is_ready, lines = ray.get(actor.answer.remote())
    if not is_ready:
        ray.kill(actor)
        raise BatonError("the server has ended:\n" + "\n".join(lines))
    return lines


def stop_server(address: str) -> int:
    """End the server of the cluster after its running requests. Return its exit code. Raises ConfigError."""
    ray = connect(address)
    try:
        actor = ray.get_actor(_NAME, namespace=NAMESPACE)
    except ValueError as error:
        raise ConfigError("no server of `baton ray up` runs on this cluster") from error
    code = ray.get(actor.stop.remote())
    ray.kill(actor)
    return code
