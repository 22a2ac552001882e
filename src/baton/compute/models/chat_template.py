"""Write a conversation the way its model was trained on: the model's own Jinja template, in a sandbox.

A template comes with the model, but it is still a program: it cannot reach Python, and its loops, its strings and its
output are bounded, so that a bad one costs a request and not the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from baton.compute.models.card import ModelCard
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.json_file import read_json
from baton.compute.models.template_sandbox import STEP_NAME, Sandbox, StepCounter, check_chars
from baton.core.errors import ModelError, RequestError

Message = Mapping[str, Any]


class ChatTemplate(Protocol):
    """How a model wants conversations written."""

    @property
    def source(self) -> str:
        """The template itself: it tells how a model writes tool calls. Empty where there is none."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a conversation as one text. Raises RequestError (400) if the model cannot follow it.

        add_generation_prompt: end with the opening of the model's own turn. extra: further variables of the template.
        """
        ...


def load_chat_template(card: ModelCard) -> ChatTemplate:
    """Find the template of a model. A model without one gets a template that refuses, so completions still work."""
    if card.format == "hash":
        return PlainTemplate()
    found = _from_gguf(Path(card.path)) if card.format == "gguf" else _from_folder(Path(card.path))
    if found is None:
        return NoTemplate(card.name)
    source, specials = found
    return JinjaTemplate(source, specials)


class PlainTemplate:
    """`role: content`, a line per message: for the hash model, which was trained on nothing."""

    source = "tools, <tool_call>"
    """It writes calls as Hermes does."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        lines = [f"{message.get('role', 'user')}: {message.get('content') or ''}\n" for message in messages]
        names = ", ".join(str(tool["function"]["name"]) for tool in tools or ())
        told = f"tools: {names}\n" if names else ""
        return told + "".join(lines) + ("assistant: " if add_generation_prompt else "")


class NoTemplate:
    """Refuses: guessing a format gives a model that seems to be bad."""

    source = ""

    def __init__(self, model: str) -> None:
        self._model = model

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        raise RequestError(
            f"{self._model} has no chat template; use /v1/completions, or serve the instruct version of the model",
            param="messages",
        )


class JinjaTemplate:
    """A template from a model's files."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """specials: `bos_token`, `eos_token` and the like, as texts. Raises ModelError for a syntax error."""
        try:
            self._template = Sandbox().from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}; download the model again") from error
        self.source = source
        self._specials = dict(specials)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        variables = {
            **self._specials,
            **(extra or {}),
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            STEP_NAME: StepCounter().step,
        }
        try:
            return self._collect(variables)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise RequestError("the model's chat template needs too much memory", param="messages") from error

    def _collect(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            chars += len(piece)
            check_chars(chars)
        return "".join(pieces)


# ---- where templates are -----------------------------------------------------------------------------------------


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
    source = (
        own_file.read_text("utf-8", errors="replace") if own_file.is_file() else _choose(options.get("chat_template"))
    )
    if source is None:
        return None
    return source, {
        key: text for key, value in options.items() if key.endswith("_token") for text in _token_text(value)
    }


def _choose(value: object) -> str | None:
    """Take the only template, or of several named ones the default."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: object) -> list[str]:
    text = value.get("content") if isinstance(value, dict) else value
    return [text] if isinstance(text, str) else []
