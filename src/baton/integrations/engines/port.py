"""The port of a server of another engine: requests, answers and properties, all in token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from baton.core.types import Role, Sampling

if TYPE_CHECKING:
    from baton.integrations.engines.legs import OpenLeg


PROBE = 'Hello, wörld! 12345 == "tokens"\n\tdef f(x): return x ** 2'
"""Text for the comparison of tokenizers: different tokenizers return different tokens for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request to a server."""

    id: str
    """Id that is unique for each request that is sent, including repetitions."""
    tokens: Sequence[int]
    """Prompt and output so far. The server sees all of them as the prompt."""
    output_tokens: int
    """Output tokens at the end of `tokens`."""
    tokens_max: int
    """Maximum tokens to generate now."""
    sampling: Sampling
    cache_salt: str = ""
    """Requests share the server's prefix cache only if their salts are equal."""
    hands_off: bool = False
    """Compute the prompt only, and keep its KV for another server."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters from the server that keeps the prompt's KV. None: no server keeps it."""
    partner: EngineServer | None = None
    """Server that runs the other leg of this request at the same time. None: there is none, or both legs are sent."""
    traceparent: str = ""
    """Header with which the server goes on with the client's trace. Empty: there is none."""


class Choice(Struct, frozen=True):
    """Tokens that a server has generated."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    """`stop` or `length` in the last one of an answer."""


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """The answer to a request that only computes a prompt."""

    tokens: list[int]
    """The first output token."""
    kv_transfer_params: dict[str, Any] | None
    """Parameters with which another server loads the KV. None: it finds the KV by tokens, or cannot load it."""
    leg: OpenLeg | None = None
    """The answer of the partner, which has begun. None: it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of a server."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_used_ratio: float = 0.0
    kv_tokens: int = 0
    """Size of the server's KV cache in tokens. 0: not known."""
    started_unix_s: float = 0.0
    """Start time of the server's process, or another number that each start changes. 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Properties of a server, read when it joins."""

    name: str
    """Name and version of the engine, for messages."""
    context_tokens: int
    """Maximum tokens of a request. 0: not known."""
    requests_max: int = 0
    """Maximum requests that the server computes at once. 0: not known."""
    role: Role | None = None
    """The only role that the server can have. None: any."""
    interface: str
    """Description of the interface that takes the requests, for messages."""
    problem: str = ""
    """Reason why the server cannot be a worker. Empty: it can."""
    load: EngineLoad


class EngineBrokenError(Exception):
    """The server did not answer, or failed during the answer. The request may succeed if it is sent again."""


class EngineGoneError(EngineBrokenError):
    """No process listens at the server's address."""


class EngineDeadError(EngineBrokenError):
    """The server answers, but its engine has ended."""


class EngineRefusedError(Exception):
    """The server rejected the request as invalid. Sending it again would not help."""


class EngineServer(Protocol):
    """The client of one server. All methods raise EngineBrokenError or EngineRefusedError."""

    context_flag: str
    """Flag of the server for its context, for messages."""

    @property
    def url(self) -> str: ...

    @property
    def is_paired(self) -> bool:
        """Whether the server runs requests only together with a partner of the other role. Known after `facts`."""
        ...

    async def disconnect(self) -> None:
        """Break all requests under way, because the server is lost. Later ones get new connections."""
        ...

    async def close(self) -> None: ...

    async def facts(self) -> EngineFacts:
        """Read the server's properties, which later requests need."""
        ...

    async def load(self) -> EngineLoad: ...

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the server's token ids of a text. None: it has no tokenizer."""
        ...

    def stream(self, generation: Generation) -> AsyncGenerator[Choice]:
        """Yield tokens as the server generates them; the last choice has a finish reason.

        Raises EngineBrokenError if the stream ends before that, EngineRefusedError if the server rejects the request.
        """
        ...

    async def prefill(self, generation: Generation) -> PromptAnswer:
        """Compute a prompt, and keep its KV for another server if the engine can. Raises as `stream` does."""
        ...

    async def abort(self, generation_id: str) -> None:
        """Abort a request by its id, because the server may not notice that its connection was closed.

        Does nothing if the server has no route for that.
        """
        ...
