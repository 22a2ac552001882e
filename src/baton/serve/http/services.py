"""The objects that all routes share: the served models, the keys and the settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from baton.core.config import SurvivalConfig
from baton.core.errors import RequestError
from baton.core.limits import LimitsConfig
from baton.core.validation import did_you_mean
from baton.decide.policy.classes import ClassTable
from baton.move.clock import unix_s
from baton.serve.http.body_threads import BodyThreads, ReceivedBody
from baton.serve.http.edge import BodyLimit
from baton.serve.http.identity import Keyring
from baton.serve.http.model_services import ModelServices
from baton.serve.http.resume import SavedStreams
from baton.serve.http.stored_responses import StoredResponses
from baton.serve.http.unknown_fields import UnknownFields
from baton.serve.http.wire.parsing import convert, parse_object
from baton.serve.live.hooks import Hooks
from baton.serve.live.recorder import Recorder

if TYPE_CHECKING:  # the extra `otel` may be missing
    from baton.serve.http.telemetry import Telemetry

NAMES_SHOWN_MAX = 8
"""Served models that an error message names."""
PARSED_INLINE_BYTES_MAX = 1 << 14
"""Larger bodies are parsed in a thread, one at a time: an odd one of 4 MB takes up to 1.5 s."""
Body = TypeVar("Body", bound=Struct)


def parsing_threads() -> BodyThreads:
    """Return threads for parsing bodies."""
    return BodyThreads(inline_bytes_max=PARSED_INLINE_BYTES_MAX, parallel_bytes_max=PARSED_INLINE_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP server."""

    bound_host: str = "127.0.0.1"
    """Address that the server listens on."""
    admin_port: int = 0
    """The only port that serves the routes of the scopes `admin` and `join`. 0: every port does."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of the server that are accepted in the Host header."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the server."""
    body_bytes_max: int = 4 * 1024 * 1024
    """Maximum size of a request body. A larger one is rejected with 413."""
    choices_max: int = 32
    """Maximum choices of an HTTP request: prompts times `n`. Each choice is a request to the cluster."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    classes: ClassTable = field(default_factory=ClassTable)
    """Service classes, and the rules that assign requests to them."""
    strict_api: bool = False
    """Reject unknown fields instead of ignoring them."""
    survival: SurvivalConfig = field(default_factory=SurvivalConfig)
    """Folder and limits of streams that can be resumed."""
    seed: int | None = None
    """Seed of the generator that draws seeds for requests without one. None: the operating system seeds it."""


@dataclass(slots=True, kw_only=True)
class Services:
    """The served models and the settings, shared by all routes."""

    models: Mapping[str, ModelServices]
    """By their names for clients. The first one serves requests that name no model. Never empty."""
    settings: HttpSettings
    keyring: Keyring
    hooks: Hooks
    recorder: Recorder
    render_metrics: Callable[..., bytes]
    """`Models.render_metrics` with the metrics of the edge."""
    telemetry: Telemetry | None = None
    """None: the server makes no traces."""
    unknown_fields: UnknownFields = field(init=False)
    parsing: BodyThreads = field(default_factory=parsing_threads)
    streams: SavedStreams = field(init=False)
    """Streams that the end of an earlier server has interrupted."""
    responses: StoredResponses = field(default_factory=StoredResponses)
    """Conversations that clients of `/v1/responses` continue by an id."""
    chats: StoredResponses = field(default_factory=partial(StoredResponses, kind="chat", rule="if `store` is true"))
    """Chats that their clients asked to store."""
    seeds: random.Random = field(init=False)
    """Draws seeds for requests without one."""
    started_unix_s: int = field(default_factory=unix_s)
    serials: itertools.count[int] = field(default_factory=itertools.count)
    """Numbers that make request ids unique, even if two clients send the same X-Request-Id."""

    @property
    def body_limit(self) -> BodyLimit:
        """Size limit of the bodies of requests for text."""
        return BodyLimit(self.settings.body_bytes_max)

    def __post_init__(self) -> None:
        self.unknown_fields = UnknownFields(is_strict=self.settings.strict_api)
        self.streams = SavedStreams(self.settings.survival, self.recorder)
        seed = self.settings.seed
        self.seeds = random.SystemRandom() if seed is None else random.Random(seed)

    async def parse(self, body: ReceivedBody) -> dict[str, Any]:
        """Return the JSON object in a body. Raises RequestError (400)."""
        return await self.parsing.run(partial(parse_object, body.raw), body)

    async def read(self, body: ReceivedBody, into: type[Body]) -> tuple[Body, list[str]]:
        """Return the struct in a body, and the fields that it ignores. Raises RequestError (400)."""
        return await self.parsing.run(
            lambda: self.unknown_fields.read(parse_object(body.raw), into, lambda known: convert(known, into)), body
        )

    def model(self, asked: str | None) -> ModelServices:
        """Return the model that a client asks for. None: it named no model, and gets the first one. Thread-safe.

        Raises RequestError (404) if the model is not served.
        """
        if asked is None:
            return list(self.models.values())[0]  # noqa: RUF015  an iterator fails if the event loop loads a model
        found = self.models.get(asked)
        if found is None:
            raise RequestError(self._unknown(asked), param="model", status=404, code="model_not_found")
        return found

    def health(self) -> ModelServices:
        """Return the model whose state is that of the server: one that it waits for, or else a ready one."""
        models = list(self.models.values())
        loading = [model for model in models if model.is_first and model.gateway.state == "loading"]
        ready = [model for model in models if model.gateway.state == "ready"]
        return (loading or ready or models)[0]

    def _unknown(self, asked: str) -> str:
        names = [repr(name) for name in list(self.models)]
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
        hint = did_you_mean(asked[:200], self.models) if len(names) > 1 else ""
        return f"the model {asked[:200]!r} is not served here{hint}; this server has {shown}"
