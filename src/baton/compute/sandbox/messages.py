"""The messages between sandboxes and their users. Loads no library that a sandbox needs: its users start quickly."""

from __future__ import annotations

import struct

from msgspec import Struct

from baton.compute.models.card import ModelCard
from baton.core.config import SandboxConfig
from baton.core.types import Grammar, RequestId

JSON_WHITESPACE = r"[ ]?|\n[ ]{0,40}"
"""Whitespace allowed between JSON tokens. Without a bound, a small model writes spaces and never reaches the value."""
PARSERS_MAX = 1024
"""The maximum number of requests with a parser. The oldest parser is dropped first, and rebuilt when needed."""
STACK_BYTES = 8 << 20
COMMAND = struct.Struct("<ci")
"""A command and a pid (0 for `FORK`)."""
STATUS = struct.Struct("<i")
FORK, WAIT = b"F", b"W"
DONE, FAILED = b"\0", b"\1"
"""The first byte of an answer. `DONE`: the result follows. `FAILED`: the reason of the failure follows."""


class GrammarChecks(Struct, frozen=True, tag=True):
    """Check grammars with the vocabulary of a model. A job is a list of grammars."""

    card: ModelCard


class MaskComputation(Struct, frozen=True, tag=True):
    """Compute token masks with the vocabulary of a model. A job is a `MaskJob`."""

    card: ModelCard


class TemplateRendering(Struct, frozen=True, tag=True):
    """Render conversations with the chat template of a model. A job is a `ChatInput`, in JSON."""

    source: str
    specials: dict[str, str]


class SandboxSetup(Struct, frozen=True):
    """The first message to a fork server."""

    task: GrammarChecks | MaskComputation | TemplateRendering
    limits: SandboxConfig
    idle_s: float = 5.0
    """A sandbox that had no job for this long ends, so that hostile grammars hold no memory. A new one takes 2 ms."""


class GrammarProblem(Struct, frozen=True):
    """The reason why a grammar is rejected."""

    index: int
    """Index of the first invalid grammar in the job."""
    reason: str
    place: str
    """The path of the innermost invalid subschema, such as `properties.a`. Empty: the whole grammar."""


class MaskJob(Struct, frozen=True, kw_only=True, array_like=True):
    """Asks for the token masks of one request: for its next token, and for the token after each draft token."""

    request_id: RequestId
    grammar: Grammar
    output: list[int]
    """The output tokens so far, without the first `skipped` ones."""
    skipped: int = 0
    """Output tokens that the request's parser has read in an earlier job."""
    drafts: list[int] = []
    stop_token_ids: tuple[int, ...] = ()


class MaskAnswer(Struct, frozen=True, array_like=True):
    """The answer of a `MaskJob`."""

    rows: list[bytes] = []
    """One mask (one bit per token) for the next token, and one more for each allowed draft."""
    problem: str = ""
    """The reason why the grammar is rejected."""
    is_unknown: bool = False
    """The parser has not read the skipped tokens: the job has to be sent again with all of them."""


class Rendered(Struct, frozen=True):
    """A rendered conversation, or the reason why the template refuses it."""

    text: str = ""
    refusal: str = ""
