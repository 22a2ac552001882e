"""The objects that all routes share, and the checks that they have in common."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from baton.compute.models.chat_template import ChatTemplate
from baton.compute.models.tokenizer import Tokenizer
from baton.compute.sandbox.template import SandboxedTemplate
from baton.core.config import SurvivalConfig
from baton.core.errors import RequestError
from baton.core.limits import LimitsConfig
from baton.core.types import Sampling
from baton.decide.policy.classes import ClassTable
from baton.move.clock import unix_s
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.identity import Identity, Keyring
from baton.serve.http.prompts import Prompt, PromptLimits, PublicPrefixes, TextEncoder
from baton.serve.http.resume import SavedStreams
from baton.serve.http.wire.errors import RETRY_AFTER_S, ClusterError
from baton.serve.live.gateway import LiveGateway
from baton.serve.live.history import History
from baton.serve.live.hooks import Hooks
from baton.serve.live.hosts import Hosts
from baton.serve.live.recorder import Recorder

Made = TypeVar("Made")
LARGE_BYTES = 1 << 18
"""Bodies above this size are tokenized one at a time, because each needs much memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP server."""

    block_tokens: int
    """Tokens in a KV block. Prompts are hashed block by block."""
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
    inline_bytes_max: int = 16384
    """Prompts in larger bodies are tokenized in a thread, so that other streams are not delayed."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    classes: ClassTable = field(default_factory=ClassTable)
    """Service classes, and the rules that assign requests to them."""
    engine: str = ""
    """Name of the engine of all workers, if it is not Baton's own."""
    survival: SurvivalConfig = field(default_factory=SurvivalConfig)
    """Folder and limits of streams that can be resumed."""
    seed: int | None = None
    """Seed of the generator that draws seeds for requests without one. None: the operating system seeds it."""


@dataclass(slots=True, kw_only=True)
class Services:
    """The cluster, the model's text tools and the settings, shared by all routes."""

    gateway: LiveGateway
    hosts: Hosts
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: GrammarChecker
    settings: HttpSettings
    keyring: Keyring
    public_prefixes: PublicPrefixes | None = None
    """Prefixes whose cached blocks all tenants share. None: there are no such prefixes."""
    hooks: Hooks
    recorder: Recorder
    history: History
    """Measurements of the last 15 minutes, for the dashboard."""
    render_metrics: Callable[[], bytes]
    streams: SavedStreams = field(init=False)
    """Streams that the end of an earlier server has interrupted."""
    seeds: random.Random = field(init=False)
    """Draws seeds for requests without one."""
    started_unix_s: int = field(default_factory=unix_s)
    large_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Allows one large body at a time to be tokenized."""
    serials: itertools.count[int] = field(default_factory=itertools.count)
    """Numbers that make request ids unique, even if two clients send the same X-Request-Id."""

    def __post_init__(self) -> None:
        self.streams = SavedStreams(self.settings.survival, self.recorder)
        seed = self.settings.seed
        self.seeds = random.SystemRandom() if seed is None else random.Random(seed)

    @property
    def texts(self) -> TextEncoder:
        """Encoder that rejects texts longer than a request may be."""
        return TextEncoder(self.tokenizer, self.gateway.request_tokens_max)

    def close(self) -> None:
        """End the sandboxes, so that a running check does not delay the end of the server."""
        self.grammars.close()
        if isinstance(self.template, SandboxedTemplate):
            self.template.close()

    def check_model(self, asked: str | None) -> None:
        """Raise RequestError (404) if the server does not serve the model `asked`. None: the client named no model."""
        served = self.gateway.card.name
        if asked is not None and asked != served:
            message = f"the model {asked[:200]!r} is not served here; this server has {served!r}"
            raise RequestError(message, param="model", status=404, code="model_not_found")

    def check_ready(self) -> None:
        """Raise ClusterError (503) while the cluster cannot take requests."""
        if self.gateway.state != "ready":
            message = f"{self.not_ready()}; wait for /health to answer 200"
            raise ClusterError(message, status=503, code="not_ready", retry_after_s=RETRY_AFTER_S)

    def check_engine(self, sampling: Sampling) -> None:
        """Raise RequestError (400) if the workers are servers of another engine that lacks a feature of the request."""
        if not self.settings.engine:
            return
        wanted = {
            "logprobs": sampling.top_logprobs is not None or sampling.prompt_logprobs,
            "response_format": sampling.grammar is not None,
            "input": sampling.embedding,
        }
        names = {"logprobs": "log probabilities", "response_format": "structured output", "input": "embeddings"}
        for param in [param for param, is_wanted in wanted.items() if is_wanted]:
            message = f"{names[param]} are not available here: the workers are {self.settings.engine} servers"
            raise RequestError(message, param=param, code="unsupported_parameter")

    def not_ready(self) -> str:
        """Return an error message with the server's state and the missing workers or hosts."""
        missing = self.hosts.missing()
        return f"the server is not ready: {self.gateway.state}" + (f", waiting for {missing}" if missing else "")

    async def read_prompts(
        self, read: Callable[[], Sequence[Prompt]], asked_salt: str | None, identity: Identity, *, param: str, size: int
    ) -> list[Prompt]:
        """Tokenize, check and hash the prompts of a body of `size` bytes. Raises RequestError (400).

        `asked_salt`: the client's cache salt. `param`: the field with the prompts, for error messages.
        """
        limits = PromptLimits(
            request_tokens_max=self.gateway.request_tokens_max,
            block_tokens=self.settings.block_tokens,
            cache_salt=identity.cache_salt(asked_salt),
            public=self.public_prefixes if identity.shares_public_prefixes(asked_salt) else None,
            param=param,
        )
        return await self.run_off_loop(lambda: [limits.check(prompt) for prompt in read()], size=size)

    async def run_off_loop(self, work: Callable[[], Made], *, size: int) -> Made:
        """Run `work` on `size` bytes of input: in a thread if it may take long, to not delay other streams.

        Large inputs run one at a time: a tokenizer needs up to 1 KB of memory and 4 us for each byte.
        """
        if size > LARGE_BYTES:
            async with self.large_turns:
                return await asyncio.to_thread(work)
        in_thread = size > self.settings.inline_bytes_max or self.template.is_sandboxed
        return await asyncio.to_thread(work) if in_thread else work()
