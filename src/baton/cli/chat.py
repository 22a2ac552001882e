"""`baton chat`: a conversation with a model of a server, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module

import msgspec
from msgspec import UNSET, Struct, UnsetType
from rich.console import Console

from baton.cli.ask_server import URL, ask, check_url, events
from baton.cli.key_flags import add_client_key, client_key
from baton.core.errors import BatonError
from baton.lab.bench.wire import Delta, StreamChunk, error_text
from baton.serve.http.wire.responses import ModelList
from baton.serve.live.live_request import Timings

ANSWER_S = 600.0
"""Maximum time without a token, because a request may wait in the server's queue."""
HELP = """/new          start a new conversation
/model NAME   ask another model; without NAME, list them
/system TEXT  set the system prompt; without TEXT, remove it
/help         show this list
/quit         leave, as Ctrl-D; Ctrl-C stops an answer"""
_DONE = b"[DONE]"
_INVISIBLE = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""Control characters but tab and line feed: a model's answer must not control the terminal."""


class Message(Struct, frozen=True, kw_only=True):
    role: str
    content: str


class _Chunk(StreamChunk):
    """The fields of a streamed chunk that are shown."""

    timings: Timings | None = None


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = True


class _Body(Struct, frozen=True, kw_only=True):
    """The request for an answer."""

    model: str
    messages: list[Message]
    temperature: float | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    stream: bool = True
    stream_options: _StreamOptions = _StreamOptions()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Talk to a model of a server with the OpenAI API."
    parser.epilog = f"Without a terminal, each line is a question. In the conversation:\n{HELP}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("url", nargs="?", default=URL, metavar="URL", help="the server (default: %(default)s)")
    add("--model", metavar="NAME", help="one of several models (default: the first)")
    add("--system", metavar="TEXT", help="system prompt")
    add("--temperature", type=float, metavar="T", help="sampling temperature (default: the server's)")
    add("--max-tokens", type=int, metavar="N", help="limit of an answer (default: the server's)")
    add_client_key(parser)


def run(args: argparse.Namespace) -> int:
    """Converse until the end of the input. Return the exit code: 1 if the server cannot be reached or answers badly."""
    check_url(args.url)
    key = client_key(args)
    try:
        chat = Conversation(args, key, _models(args.url, key))
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return 1
    with contextlib.suppress(ImportError):
        import_module("readline")  # if Python has it, `input` edits lines and keeps their history
    if sys.stdin.isatty():
        chat.console.print(f"{chat.model} at {args.url}; /help lists the commands", markup=False, highlight=False)
    return chat.converse()


def _models(url: str, key: str | None) -> list[str]:
    """Return the names of the server's models. Raises BatonError if there are none."""
    try:
        names = [model.id for model in msgspec.json.decode(ask(url, "/v1/models", key), type=ModelList).data]
    except msgspec.DecodeError as error:
        raise BatonError(f"{url} lists no models: {error}; is there a server with the OpenAI API?") from error
    if not names:
        raise BatonError(f"{url} has no model; load one first")
    return names


@dataclass(slots=True)
class _Reply:
    """An answer so far."""

    text: str = ""
    reason: str = ""
    tokens: int = 0
    timings: Timings | None = None


class Conversation:
    """A conversation: its messages, its settings, and the loop that reads and answers."""

    def __init__(self, args: argparse.Namespace, key: str | None, models: list[str]) -> None:
        self._url, self._key, self._models = args.url, key, models
        self._temperature = UNSET if args.temperature is None else args.temperature
        self._max_tokens = UNSET if args.max_tokens is None else args.max_tokens
        self.model: str = args.model or models[0]
        self.system: str = args.system or ""
        self.messages: list[Message] = []
        self.console = Console(highlight=False, markup=False, soft_wrap=True)

    def converse(self) -> int:
        """Answer each line of the input. Return 1 if the last question failed, else 0."""
        code = 0
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return code
            if line in ("/quit", "/exit"):
                return code
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            elif line:
                code = self._ask(line)

    def _command(self, name: str, rest: str) -> None:
        match name, rest.strip():
            case "/new", _:
                self.messages.clear()
            case "/model", "":
                self.console.print(", ".join(self._models))
            case "/model", model:
                self.model = model
            case "/system", text:
                self.system = text
            case "/help", _:
                self.console.print(HELP)
            case _:
                self.console.print(f"there is no command {name}\n{HELP}")

    def _ask(self, question: str) -> int:
        """Ask, and show the answer as it arrives.

        A question that failed, or was stopped before an answer, is not part of the conversation.
        """
        reply, asked = _Reply(), Message(role="user", content=question)
        body = _Body(
            model=self.model,
            messages=[*self._head(), *self.messages, asked],
            temperature=self._temperature,
            max_tokens=self._max_tokens,
        )
        try:
            with closing(self._chunks(body)) as chunks:
                for chunk in chunks:
                    self._show(reply, chunk)
        except KeyboardInterrupt:
            reply.reason = "stopped"
        except BatonError as error:
            self.console.print()
            print(f"baton: {error}", file=sys.stderr)  # noqa: T201
            return 1
        self.console.print()
        if reply.text or reply.reason != "stopped":
            self.messages += [asked, Message(role="assistant", content=reply.text)]
        if sys.stdin.isatty():
            self.console.print(_figures(reply), style="dim")
        return 0

    def _head(self) -> list[Message]:
        return [Message(role="system", content=self.system)] if self.system else []

    def _chunks(self, body: _Body) -> Generator[_Chunk]:
        """Yield the chunks of an answer. Closing the iterator cancels the request.

        Raises BatonError for an error in the stream.
        """
        request = msgspec.json.encode(body)
        with closing(events(self._url, "/v1/chat/completions", self._key, request, timeout_s=ANSWER_S)) as stream:
            for data in stream:
                if data.strip() == _DONE:
                    return
                try:
                    chunk = msgspec.json.decode(data, type=_Chunk)
                except msgspec.DecodeError as error:
                    raise BatonError(f"{self._url} sent no chunk of an answer: {error}") from error
                if bytes(chunk.error) not in (b"", b"null"):
                    raise BatonError(f"the answer ended: {error_text(data)}")
                yield chunk

    def _show(self, reply: _Reply, chunk: _Chunk) -> None:
        for choice in chunk.choices:
            delta = choice.delta or Delta()
            if delta.reasoning_content:
                self._print(delta.reasoning_content, style="dim")
            if delta.content:
                reply.text += delta.content
                self._print(delta.content)
            reply.reason = choice.finish_reason or reply.reason
        reply.tokens = (chunk.usage.completion_tokens if chunk.usage is not None else None) or reply.tokens
        reply.timings = chunk.timings or reply.timings

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(text.translate(_INVISIBLE), end="", style=style)


def _figures(reply: _Reply) -> str:
    """Return the figures of an answer in one line."""
    parts = [f"{reply.tokens} tokens"] if reply.tokens else []
    timings = reply.timings
    if timings is not None and timings.ttft_s is not None:
        parts.append(f"TTFT {timings.ttft_s * 1000:,.0f} ms")
    if timings is not None and timings.tpot_s:
        parts.append(f"TPOT {timings.tpot_s * 1000:,.1f} ms")
    if timings is not None and timings.cached_tokens:
        parts.append(f"{timings.cached_tokens} tokens cached")
    if reply.reason not in ("", "stop"):
        parts.append({"length": "cut off at the limit of tokens"}.get(reply.reason, reply.reason))
    return ", ".join(parts)
