"""What the routes need of one served model: its cluster, its text tools, and the checks of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from baton.compute.models.chat_template import ChatTemplate
from baton.compute.models.tokenizer import Tokenizer
from baton.compute.sandbox.template import SandboxedTemplate
from baton.core.errors import RequestError
from baton.core.types import Sampling
from baton.serve.http.body_threads import BodyThreads, ReceivedBody
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.identity import Identity
from baton.serve.http.prompts import Prompt, PromptLimits, PublicPrefixes, TextEncoder
from baton.serve.http.wire.errors import RETRY_AFTER_S, ClusterError
from baton.serve.live.gateway import LiveGateway
from baton.serve.live.history import History
from baton.serve.live.hosts import Hosts

Made = TypeVar("Made")
TOKENIZED_INLINE_BYTES_MAX, TOKENIZED_PARALLEL_BYTES_MAX = 1 << 14, 1 << 18
"""Limits of `BodyThreads` for tokenization, which needs up to 1 KB of memory and 4 us for each byte."""


def tokenizing_threads() -> BodyThreads:
    """Return threads for tokenization, which all models of a server share."""
    return BodyThreads(inline_bytes_max=TOKENIZED_INLINE_BYTES_MAX, parallel_bytes_max=TOKENIZED_PARALLEL_BYTES_MAX)


@dataclass(slots=True, kw_only=True)
class ModelServices:
    """The cluster and the text tools of one model."""

    gateway: LiveGateway
    hosts: Hosts
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: GrammarChecker
    history: History
    """Measurements of the last 15 minutes, for the dashboard."""
    block_tokens: int
    """Tokens in a KV block. Prompts are hashed block by block."""
    is_first: bool = True
    """The server starts with this model, and is not ready before it."""
    engine: str = ""
    """Name of the engine of all workers, if it is not Baton's own."""
    public_prefixes: PublicPrefixes | None = None
    """Prefixes whose cached blocks all tenants share. None: there are no such prefixes."""
    tokenizing: BodyThreads = field(default_factory=tokenizing_threads)

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return self.gateway.card.name

    @property
    def texts(self) -> TextEncoder:
        """Encoder that rejects texts longer than a request may be, or with tokens that the model cannot read."""
        return TextEncoder(self.tokenizer, self.gateway.request_tokens_max, self.gateway.card.vocab_tokens)

    def close(self) -> None:
        """End the sandboxes, so that a running check does not delay the end of the model."""
        self.grammars.close()
        if isinstance(self.template, SandboxedTemplate):
            self.template.close()

    def check_ready(self) -> None:
        """Raise ClusterError (503) while the cluster cannot take requests."""
        if self.gateway.state != "ready":
            message = f"{self.not_ready()}; wait for /health to answer 200"
            raise ClusterError(message, status=503, code="not_ready", retry_after_s=RETRY_AFTER_S)

    def check_engine(self, sampling: Sampling) -> None:
        """Raise RequestError (400) if the workers are servers of another engine that lacks a feature of the request."""
        if not self.engine:
            return
        wanted = {
            "bad_words": bool(sampling.bad_words),
            "logprobs": sampling.top_logprobs is not None or sampling.prompt_logprobs,
            "response_format": sampling.grammar is not None,
            "input": sampling.embedding,
        }
        names = {
            "bad_words": "bad words",
            "logprobs": "log probabilities",
            "response_format": "structured output",
            "input": "embeddings",
        }
        for param in [param for param, is_wanted in wanted.items() if is_wanted]:
            message = f"{names[param]} are not available here: the workers are {self.engine} servers"
            raise RequestError(message, param=param, code="unsupported_parameter")

    def not_ready(self) -> str:
        """Return an error message with the model's state and the missing workers or hosts."""
        missing = self.hosts.missing()
        return f"the server is not ready: {self.gateway.state}" + (f", waiting for {missing}" if missing else "")

    async def read_prompts(
        self,
        read: Callable[[], Sequence[Prompt]],
        asked_salt: str | None,
        identity: Identity,
        *,
        param: str,
        body: ReceivedBody,
    ) -> list[Prompt]:
        """Tokenize, check and hash the prompts of a body. Raises RequestError (400).

        `asked_salt`: the client's cache salt. `param`: the field with the prompts, for error messages.
        """
        limits = PromptLimits(
            request_tokens_max=self.gateway.request_tokens_max,
            block_tokens=self.block_tokens,
            cache_salt=identity.cache_salt(asked_salt),
            public=self.public_prefixes if identity.shares_public_prefixes(asked_salt) else None,
            param=param,
        )
        return await self.tokenize(lambda: [limits.check(prompt) for prompt in read()], body)

    async def tokenize(self, work: Callable[[], Made], body: ReceivedBody) -> Made:
        """Tokenize or detokenize by `work`, which gets its input from a body."""
        return await self.tokenizing.run(work, body, may_block=self.template.is_sandboxed)
