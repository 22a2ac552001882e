"""The routes that list, load and unload the models of a running server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import RequestError
from baton.core.served_model import ServedModelConfig
from baton.serve.http.edge import read_object
from baton.serve.http.identity import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from baton.serve.http.pages import json_response
from baton.serve.http.wire.parsing import convert

MODELS_PATH = "/cluster/models"


class ModelStatus(Struct, frozen=True, kw_only=True):
    """A model of the server."""

    id: str
    """Its name for clients."""
    state: str
    """`loading`, `ready`, `stopping` (its last requests end), `deserted`, or `failed: <reason>`."""
    workers: int
    cores: int
    """Cores that its workers may use."""
    kv_bytes: int
    """Size of its KV cache on the server's own host."""


class ModelStatuses(Struct, frozen=True):
    models: list[ModelStatus]


class AdapterBody(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/load_lora_adapter`, as vLLM takes it."""

    lora_name: str
    lora_path: str
    """A folder on the server."""
    base_model: str = ""
    """The served model to adapt. Empty: the first one."""
    load_inplace: Literal[False] = False


class AdapterName(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None
    """Not used: names are unique."""


class ModelLoader(Protocol):
    """Loads and unloads models. Implemented by `Models`, in the layer above."""

    def statuses(self) -> Sequence[ModelStatus]: ...

    async def load(self, table: ServedModelConfig) -> ModelStatus: ...

    async def unload(self, name: str) -> None: ...

    async def load_adapter(self, name: str, folder: str, base: str = "") -> ModelStatus: ...


class ModelRoutes:
    """The endpoints. They need the scope `admin`."""

    def __init__(self, loader: ModelLoader) -> None:
        self._loader = loader

    def routes(self) -> list[Route]:
        return [
            Route(MODELS_PATH, self._list, methods=["GET"]),
            Route(MODELS_PATH, self._load, methods=["POST"]),
            Route(MODELS_PATH + "/{model:path}", self._unload, methods=["DELETE"]),
            Route(LOAD_ADAPTER_PATH, self._load_adapter, methods=["POST"]),
            Route(UNLOAD_ADAPTER_PATH, self._unload_adapter, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        return json_response(ModelStatuses(list(self._loader.statuses())))

    async def _load(self, request: Request) -> Response:
        """Begin to load a model. Its state is `ready` once its workers have the weights."""
        table = convert(await read_object(request), ServedModelConfig)
        if table.tiers:  # a path to write to is the operator's choice, and not that of a key
            raise RequestError("tiers are set in the configuration only, in [[models]]; leave them out", param="tiers")
        return json_response(await self._loader.load(table), status=202)

    async def _unload(self, request: Request) -> Response:
        """Unload a model. The response comes when its processes have ended."""
        await self._loader.unload(request.path_params["model"])
        return json_response(ModelStatuses(list(self._loader.statuses())))

    async def _load_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter as a model beside its base model. The response comes when it serves requests."""
        asked = convert(await read_object(request), AdapterBody)
        return json_response(await self._loader.load_adapter(asked.lora_name, asked.lora_path, asked.base_model))

    async def _unload_adapter(self, request: Request) -> Response:
        await self._loader.unload(convert(await read_object(request), AdapterName).lora_name)
        return json_response(ModelStatuses(list(self._loader.statuses())))
