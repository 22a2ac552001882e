"""Render a model's own Jinja template in this process. Runs inside of sandboxes, and in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

from baton.compute.models.chat_template import ChatInput
from baton.compute.models.template_sandbox import STEP_NAME, Sandbox, StepCounter, check_chars
from baton.core.errors import ModelError, RequestError


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
