"""The models of a server: start them, load and unload further ones while the others serve, and end them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from baton.core.config import Config
from baton.core.errors import BatonError, RequestError
from baton.core.served_model import MODELS_MAX, ServedModelConfig
from baton.serve.host.tasks import run_in_thread
from baton.serve.host.worker_link import EngineHosts
from baton.serve.http.model_routes import ModelStatus
from baton.serve.http.model_services import ModelServices
from baton.serve.live.assembly import Parts
from baton.serve.live.metrics_registry import Metrics, render
from baton.serve.live.several_models import assemble_table
from baton.serve.live.vllm_names import VllmNames
from baton.serve.model_fleet import ModelFleet, ServerFacts


class Models:
    """The models of a server by their names. Implements `ModelLoader`."""

    def __init__(
        self,
        config: Config,
        first: Sequence[Parts],
        facts: ServerFacts,
        *,
        changed: Callable[[], None],
        engines: EngineHosts | None = None,
    ) -> None:
        """`first`: the models that the server starts with. `changed`: as for `ModelFleet`."""
        self.served: dict[str, ModelServices] = {}
        """The models that requests may name. The first one serves requests that name none."""
        self._config = config
        self._facts = facts
        self._changed = changed
        self._engines = engines
        self._fleets = {parts.card.name: ModelFleet(parts, facts, changed=changed, engines=engines) for parts in first}
        self._changing = asyncio.Lock()
        """One model at a time is loaded or unloaded, so that the shares of the host add up."""

    @property
    def fleets(self) -> Sequence[ModelFleet]:
        """The models, those included that are loading or have failed."""
        return tuple(self._fleets.values())

    async def start(self) -> None:
        """Start the first models. Raises ModelError or ConfigError."""
        for name, fleet in self._fleets.items():
            self.served[name] = await fleet.start()
        first = next(iter(self.served.values()))
        for alias in self._config.served_aliases:
            self.served.setdefault(alias, first)

    async def drain(self) -> None:
        """Wait for the running requests of all models, up to `drain_s`, then cancel them."""
        await asyncio.gather(*(fleet.drain() for fleet in self.fleets))

    async def close(self) -> None:
        """Stop everything that was started. Raises AssertionError if a pool has lost a block."""
        await asyncio.gather(*(fleet.close() for fleet in self.fleets))
        for fleet in self.fleets:
            fleet.check_blocks()

    def cancel_all(self) -> None:
        """Cancel the requests of all models."""
        for fleet in self.fleets:
            fleet.parts.gateway.cancel_all()

    def render_metrics(self, edge: Metrics, *, with_tenants: bool) -> bytes:
        """Return the exposition text of all models, and of the HTTP edge."""
        for fleet in self.fleets:
            fleet.refresh_metrics()
        models = {name: fleet.parts.metrics for name, fleet in self._fleets.items()}
        others = [VllmNames(models)] if self._config.http.metrics_names == "vllm" else []
        return render(edge, models, *others, with_tenants=with_tenants)

    # ---- while the server runs

    def statuses(self) -> list[ModelStatus]:
        """Return the models with their states, in the order of their loading."""
        return [fleet.status() for fleet in self.fleets]

    async def load(self, table: ServedModelConfig) -> ModelStatus:
        """Load one more model. Its workers read the weights in the background. Raises RequestError."""
        if self._engines is not None:
            message = "the workers of this server are servers of another engine: it serves one model"
            raise RequestError(message, status=409, code="one_model")
        async with self._changing:
            if len(self._fleets) >= MODELS_MAX:
                message = f"this server has {MODELS_MAX} models, which is the maximum; unload one"
                raise RequestError(message, status=409, code="too_many_models")
            others = [fleet.parts for fleet in self.fleets]
            try:
                parts = await run_in_thread(partial(assemble_table, self._config, table, others))
                fleet = ModelFleet(parts, self._facts, changed=self._changed, is_first=False)
                self._fleets[fleet.name] = fleet
                await self._start(fleet)
            except BatonError as error:
                raise RequestError(str(error), param="model", code="model_not_loaded") from error
            self._facts.tell(f"model {fleet.name} is loading")
            return fleet.status()

    async def load_adapter(self, name: str, folder: str, base: str = "") -> ModelStatus:
        """Load a LoRA adapter of a served model, and wait until it serves requests. `base` empty: the first model.

        Raises RequestError.
        """
        await self.load(self._adapted(name, folder, base))
        fleet = self._fleets[name]
        await fleet.wait_settled()
        if fleet.failure:
            async with self._changing:
                if self._fleets.get(name) is fleet:
                    await self._unload(fleet)  # so that it can be loaded again
            raise RequestError(f"the adapter {name!r} cannot be served: {fleet.failure}", status=500)
        return fleet.status()

    def _adapted(self, name: str, folder: str, base: str) -> ServedModelConfig:
        if not folder:
            message = "lora_path is empty; give the folder of a LoRA adapter on the server"
            raise RequestError(message, param="lora_path")
        bases = {fleet.name: fleet.parts.config for fleet in self.fleets if not fleet.parts.config.adapter}
        if (base and base not in bases) or not bases:
            known = ", ".join(map(repr, bases)) or "none"
            message = f"there is no base model {base[:200]!r} to adapt; this server has {known}"
            raise RequestError(message, param="base_model", status=404, code="model_not_found")
        config = bases[base or next(iter(bases))]
        return ServedModelConfig(
            model=config.model,
            name=name,
            adapter=folder,
            load_format=config.load_format,
            dtype=config.dtype,
            weights=config.weights,
            context_tokens=config.context_tokens,
            **msgspec.structs.asdict(config.topology),
        )

    async def _start(self, fleet: ModelFleet) -> None:
        try:
            self.served[fleet.name] = await fleet.start()
        except BatonError:
            del self._fleets[fleet.name]
            await fleet.close()
            raise

    async def unload(self, name: str) -> None:
        """Let the running requests of a model end, then end its processes and free its memory. Raises RequestError."""
        async with self._changing:
            fleet = self._fleets.get(name)
            if fleet is None:
                known = ", ".join(map(repr, self._fleets))
                message = f"there is no model {name[:200]!r} to unload; this server has {known}"
                raise RequestError(message, param="model", status=404, code="model_not_found")
            if len(self._fleets) == 1:
                message = f"{name!r} is the only model of this server: load another one first, or end the server"
                raise RequestError(message, param="model", status=409, code="only_model")
            await self._unload(fleet)

    async def _unload(self, fleet: ModelFleet) -> None:
        unloaded = self.served.get(fleet.name)
        for known in [known for known, model in self.served.items() if model is unloaded]:
            del self.served[known]
        await fleet.drain()
        await fleet.close()
        del self._fleets[fleet.name]
        fleet.check_blocks()
        self._facts.tell(f"model {fleet.name} is unloaded")
        self._changed()
