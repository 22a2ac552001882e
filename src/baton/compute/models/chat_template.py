"""Render a conversation as the text format of its model: the model's own Jinja template.

A template is a program that comes with the model. It cannot access Python, and its loops, strings and output are
bounded. A server renders it in a sandbox process, `baton.compute.sandbox.template`, which bounds its time and memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from baton.compute.models.card import ModelCard
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.json_file import read_bounded, read_json
from baton.core.errors import RequestError

TEMPLATE_BYTES_MAX = 1 << 20
"""Maximum size of chat_template.jinja."""


class ChatInput(Struct, frozen=True, omit_defaults=True):
    """The variables of a chat template."""

    messages: list[dict[str, Any]] | None = None
    """Messages of the conversation. None: only compile the template."""
    add_generation_prompt: bool = True
    """End with the start of the model's turn."""
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    """Further variables."""


class ChatTemplate(Protocol):
    """Renders conversations in the format of a model."""

    @property
    def source(self) -> str:
        """The text of the template, which shows how a model writes tool calls. Empty without a template."""
        ...

    @property
    def is_sandboxed(self) -> bool:
        """True if `render` waits for another process, so that it has to run in a thread."""
        ...

    def render(self, chat: ChatInput) -> str:
        """Return a conversation as one text. Raises RequestError (400) if the template refuses the messages."""
        ...


class PlainTemplate:
    """The template of the hash model: `role: content`, one line per message."""

    source = "tools, <tool_call>"
    """A text that makes the server use the tool-call format of Hermes."""
    is_sandboxed = False

    def render(self, chat: ChatInput) -> str:
        lines = [f"{message.get('role', 'user')}: {message.get('content') or ''}\n" for message in chat.messages or ()]
        names = ", ".join(str(tool["function"]["name"]) for tool in chat.tools or ())
        tools_line = f"tools: {names}\n" if names else ""
        return tools_line + "".join(lines) + ("assistant: " if chat.add_generation_prompt else "")


class NoTemplate:
    """Rejects every conversation, because a model gives bad answers in a guessed format."""

    source = ""
    is_sandboxed = False

    def __init__(self, model: str) -> None:
        self._model = model

    def render(self, chat: ChatInput) -> str:
        raise RequestError(
            f"{self._model} has no chat template; use /v1/completions, or serve the instruct version of the model",
            param="messages",
        )


# ---- finding the template of a model -----------------------------------------------------------------------------


def find_template(card: ModelCard) -> tuple[str, dict[str, str]] | None:
    """Return the text of a model's template and its special tokens, or None if the model has no template."""
    return _from_gguf(Path(card.path)) if card.format == "gguf" else _from_folder(Path(card.path))


def _from_gguf(path: Path) -> tuple[str, dict[str, str]] | None:
    metadata = open_gguf(path).metadata
    source, tokens = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(source, str):
        return None
    specials: dict[str, str] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and isinstance(tokens, list) and 0 <= token < len(tokens):
            specials[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = str(tokens[token])
    return source, specials


def _from_folder(folder: Path) -> tuple[str, dict[str, str]] | None:
    path, own_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    options = read_json(path, dict[str, Any]) if path.is_file() else {}
    if own_file.is_file():
        source: str | None = read_bounded(own_file, TEMPLATE_BYTES_MAX).decode(errors="replace")
    else:
        source = _default_template(options.get("chat_template"))
    if source is None:
        return None
    return source, {
        key: text for key, value in options.items() if key.endswith("_token") for text in _token_text(value)
    }


def _default_template(value: object) -> str | None:
    """Return the only template, or the one named `default` of several."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: object) -> list[str]:
    text = value.get("content") if isinstance(value, dict) else value
    return [text] if isinstance(text, str) else []
