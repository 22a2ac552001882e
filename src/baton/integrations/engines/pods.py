"""The vLLM servers in pods of Kubernetes that have certain labels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from baton.core.engine_config import SERVERS_MAX, EngineConfig, EnginePodsConfig
from baton.core.errors import ConfigError
from baton.integrations.engines.port import EngineBrokenError
from baton.integrations.kubernetes import KubernetesApi, Pod


@dataclass(frozen=True, slots=True)
class EnginePods:
    """Finds the servers."""

    config: EnginePodsConfig
    api: KubernetesApi
    namespace: str

    @staticmethod
    def of(config: EnginePodsConfig, api: KubernetesApi) -> EnginePods:
        """Return the pods that a configuration selects. Raises ConfigError outside of a cluster."""
        if not api.is_reachable:
            raise ConfigError("--engine-pods needs a pod with a service account; elsewhere, give --engine-url")
        return EnginePods(config, api, config.namespace or api.namespace())

    async def listings(self, tell: Callable[[str], None], check_s: float) -> AsyncGenerator[Sequence[EngineConfig]]:
        """Yield the servers of the ready pods repeatedly, and report each new problem."""
        said = ""
        while True:
            try:
                yield await self.servers()
                said = ""
            except EngineBrokenError as error:
                if str(error) != said:
                    tell(str(error))
                said = str(error)
            await asyncio.sleep(check_s)

    async def servers(self) -> Sequence[EngineConfig]:
        """Return the servers of the ready pods. Raises EngineBrokenError if the API does not answer."""
        try:
            pods = await self.api.ready_pods(self.namespace, self.config.selector)
        except EngineBrokenError as error:
            raise EngineBrokenError(f"the pods with {self.config.selector} are not known: {error}") from error
        return [self._server(pod) for pod in pods[:SERVERS_MAX]]

    def _server(self, pod: Pod) -> EngineConfig:
        events, replay = self.config.kv_events_port, self.config.kv_events_replay_port
        return EngineConfig(
            url=f"http://{pod.host}:{self.config.port}",
            role=pod.role,
            kv_events=f"tcp://{pod.host}:{events}" if events else "",
            kv_events_replay=f"tcp://{pod.host}:{replay}" if replay else "",
        )
