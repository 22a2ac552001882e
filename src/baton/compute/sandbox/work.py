"""The work of sandboxes: check grammars, compute token masks, render chat templates. Runs inside of a sandbox."""

from __future__ import annotations

from typing import Any, Protocol, assert_never

import msgspec
from msgspec import Struct

from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import JinjaTemplate
from baton.compute.models.grammar import GrammarProblem, first_problem, token_trie
from baton.compute.models.grammar_masks import GrammarMasks, MaskJob
from baton.compute.models.tokenizer import load_tokenizer
from baton.core.config import SandboxConfig
from baton.core.errors import ModelError, RequestError
from baton.core.types import Grammar


class GrammarChecks(Struct, frozen=True, tag=True):
    """Check grammars with the vocabulary of a model. A job is a list of grammars."""

    card: ModelCard


class MaskComputation(Struct, frozen=True, tag=True):
    """Compute token masks with the vocabulary of a model. A job is a `MaskJob`."""

    card: ModelCard


class TemplateRendering(Struct, frozen=True, tag=True):
    """Render conversations with the chat template of a model. A job is a `Conversation`."""

    source: str
    specials: dict[str, str]


class SandboxSetup(Struct, frozen=True):
    """The first message to a fork server."""

    task: GrammarChecks | MaskComputation | TemplateRendering
    limits: SandboxConfig


class Conversation(Struct, frozen=True, omit_defaults=True):
    """The variables of a chat template."""

    messages: list[dict[str, Any]] | None = None
    """None: only compile the template."""
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class Rendered(Struct, frozen=True):
    """A rendered conversation, or the reason why the template refuses it."""

    text: str = ""
    refusal: str = ""


class SandboxWork(Protocol):
    def run(self, job: bytes) -> bytes:
        """Return the answer of a job. Any error or crash fails this job alone."""
        ...


def open_work(task: GrammarChecks | MaskComputation | TemplateRendering) -> SandboxWork:
    """Return the work of a task. Loads the model's vocabulary if the task needs it, but touches no client's input."""
    match task:
        case GrammarChecks(card=card):
            return _Checks(card)
        case MaskComputation(card=card):
            return _Masks(card)
        case TemplateRendering():
            return _Rendering(task)
        case _:
            assert_never(task)


class _Checks:
    def __init__(self, card: ModelCard) -> None:
        self._trie = token_trie(load_tokenizer(card), vocab_tokens=card.vocab_tokens, eos_token_ids=card.eos_token_ids)
        self._decoder = msgspec.msgpack.Decoder(list[Grammar])

    def run(self, job: bytes) -> bytes:
        problem: GrammarProblem | None = first_problem(self._decoder.decode(job), self._trie)
        return msgspec.msgpack.encode(problem)


class _Masks:
    def __init__(self, card: ModelCard) -> None:
        trie = token_trie(load_tokenizer(card), vocab_tokens=card.vocab_tokens, eos_token_ids=card.eos_token_ids)
        self._masks = GrammarMasks(trie)
        self._decoder = msgspec.msgpack.Decoder(MaskJob)

    def run(self, job: bytes) -> bytes:
        return msgspec.msgpack.encode(self._masks.answer(self._decoder.decode(job)))


class _Rendering:
    """The template is compiled by the first job, inside of the sandbox, because compiling also computes constants."""

    def __init__(self, task: TemplateRendering) -> None:
        self._task = task
        self._template: JinjaTemplate | None = None
        self._decoder = msgspec.msgpack.Decoder(Conversation)

    def run(self, job: bytes) -> bytes:
        talk = self._decoder.decode(job)
        try:
            if self._template is None:
                self._template = JinjaTemplate(self._task.source, self._task.specials)
            if talk.messages is None:
                return msgspec.msgpack.encode(Rendered())
            text = self._template.render(
                talk.messages,
                add_generation_prompt=talk.add_generation_prompt,
                tools=talk.tools,
                extra=talk.extra,
            )
        except (RequestError, ModelError) as error:
            return msgspec.msgpack.encode(Rendered(refusal=str(error)))
        return msgspec.msgpack.encode(Rendered(text))
