"""The work of sandboxes: check grammars, compute token masks, render chat templates. Runs inside of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, assert_never

import msgspec
from jinja2 import TemplateError

from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import ChatInput
from baton.compute.models.grammar import first_problem, token_trie
from baton.compute.models.grammar_masks import GrammarMasks
from baton.compute.models.template_sandbox import STEP_NAME, Sandbox, StepCounter, check_chars
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.messages import (
    GrammarChecks,
    GrammarProblem,
    MaskComputation,
    MaskJob,
    Rendered,
    TemplateRendering,
)
from baton.core.errors import ModelError, RequestError
from baton.core.types import Grammar


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
    """Renders conversations with one chat template.

    The first job compiles the template: compiling evaluates constant expressions of the template, so it has to happen
    inside the sandbox, under the limits of a job.
    """

    def __init__(self, task: TemplateRendering) -> None:
        self._task = task
        self._template: JinjaTemplate | None = None
        self._decoder = msgspec.json.Decoder(ChatInput)

    def run(self, job: bytes) -> bytes:
        chat = self._decoder.decode(job)
        try:
            if self._template is None:
                self._template = JinjaTemplate(self._task.source, self._task.specials)
            if chat.messages is None:
                return msgspec.msgpack.encode(Rendered())
            text = self._template.render(chat)
        except (RequestError, ModelError) as error:
            return msgspec.msgpack.encode(Rendered(refusal=str(error)))
        return msgspec.msgpack.encode(Rendered(text))


class JinjaTemplate:
    """A template from a model's files, rendered in this process."""

    is_sandboxed = False

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """specials: `bos_token`, `eos_token` and the like, as texts. Raises ModelError for a syntax error."""
        try:
            self._template = Sandbox().from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}; download the model again") from error
        self.source = source
        self._specials = dict(specials)

    def render(self, chat: ChatInput) -> str:
        # A MemoryError is not caught: it ends the sandbox, and the error for the client then names its limit.
        variables = {
            **self._specials,
            **(chat.extra or {}),
            "messages": chat.messages or [],
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
            STEP_NAME: StepCounter().step,
        }
        try:
            return self._collect(variables)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except RecursionError as error:
            message = "the model's chat template is nested too deeply, or calls itself without end"
            raise RequestError(message, param="messages") from error

    def _collect(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            chars += len(piece)
            check_chars(chars)
        return "".join(pieces)
