"""Render the chat template of a model in a sandbox, because its time and memory are not bounded."""

from __future__ import annotations

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import ChatInput, ChatTemplate, NoTemplate, PlainTemplate, find_template
from baton.compute.sandbox.messages import Rendered, SandboxSetup, TemplateRendering
from baton.compute.sandbox.process import SandboxError, SandboxPool
from baton.core.config import SandboxConfig
from baton.core.errors import ModelError, RequestError


def load_chat_template(card: ModelCard, limits: SandboxConfig) -> ChatTemplate:
    """Return the template of a model. Without one, return a template that rejects chats; completions still work.

    Raises ModelError for a template that cannot be compiled within the limits.
    """
    if card.format == "hash":
        return PlainTemplate()
    found = find_template(card)
    if found is None and card.format == "dummy":
        return PlainTemplate()
    if found is None:
        return NoTemplate(card.name)
    template = SandboxedTemplate(*found, limits)
    template.compile()
    return template


class SandboxedTemplate:
    """Renders conversations with a template from a model's files, in a sandbox."""

    is_sandboxed = True

    def __init__(self, source: str, specials: dict[str, str], limits: SandboxConfig) -> None:
        """specials: `bos_token`, `eos_token` and the like, as texts."""
        self.source = source
        self._pool = SandboxPool(SandboxSetup(TemplateRendering(source, specials), limits), limits.processes)
        self._decoder = msgspec.msgpack.Decoder(Rendered)

    def compile(self) -> None:
        """Raise ModelError if the template cannot be compiled."""
        try:
            refusal = self._call(ChatInput()).refusal
        except RequestError as error:
            refusal = str(error)
        if refusal:
            raise ModelError(refusal)

    def render(self, chat: ChatInput) -> str:
        rendered = self._call(chat)
        if rendered.refusal:
            raise RequestError(rendered.refusal, param="messages")
        return rendered.text

    def close(self) -> None:
        self._pool.close()

    def _call(self, job: ChatInput) -> Rendered:
        try:
            return self._decoder.decode(self._pool.call(msgspec.json.encode(job)))
        except SandboxError as error:
            status = 400 if error.is_lasting else 503
            message = f"the model's chat template cannot be used: {error}"
            raise RequestError(message, param="messages", status=status) from error
        except (RecursionError, UnicodeEncodeError) as error:
            message = "the messages are nested too deeply, or are no valid Unicode; send simpler ones"
            raise RequestError(message, param="messages") from error
