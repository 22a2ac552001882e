"""Separate tool calls from text while it streams. Text that is not a call is kept unchanged."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

import msgspec

from baton.serve.http.tools.formats import ToolFormat

State = Literal["start", "text", "before", "head", "arguments", "tail", "after"]
CALL_ID_CHARS = 9
"""Length of a call's id. Mistral's templates accept only ids of nine letters and digits."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_BETWEEN = " \t\r\n,;]"
"""Characters that may separate tool calls."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """New characters of a call's arguments. Only the first part of a call has `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A piece of text, separated into plain text and calls."""

    text: str
    parts: tuple[CallPart, ...] = ()


def call_id(seed: str) -> str:
    """Return an id of nine letters and digits, the same for the same seed."""
    number = int.from_bytes(blake2b(seed.encode(), digest_size=8).digest(), "little")
    characters: list[str] = []
    for _ in range(CALL_ID_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def _read(text: str) -> object:
    """Decode JSON. Return None if it is invalid: models write bad escapes, incomplete characters and deep nesting."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


class JsonEnd:
    """Finds the end of a JSON object, character by character."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, character: str) -> bool:
        """Add the next character. Return True if it closes the object."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
            return False
        self._in_string = character == '"'
        self.depth += (character in "{[") - (character in "}]")
        return self.depth <= 0


class ToolParser:
    """Parses the text of one choice. Arguments are streamed if they follow the call's name, else sent at its end."""

    def __init__(self, form: ToolFormat, *, name: str, calls_max: int | None = None) -> None:
        """`name`: seed of call ids, unique for each choice. `calls_max`: text after this number of calls is dropped."""
        self.calls = 0
        self._form = form
        self._name = name
        self._calls_max = calls_max
        self._head = re.compile(rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{form.arguments}"\s*:\s*')
        self._state: State = "start" if form.is_bare else "text"
        self._held: list[str] = []
        """White space and marks that may belong to a call. If they do not, they become text."""
        self._candidate = ""
        """End of `_held` that may become a mark. The white space before it is not scanned again."""
        self._object = ""
        """The JSON of the call up to its arguments."""
        self._end = JsonEnd()
        self._text: list[str] = []
        self._parts: list[CallPart] = []
        self._fragment: list[str] = []
        """Characters of the arguments that `push` has not returned yet."""

    @property
    def is_full(self) -> bool:
        """True if `calls_max` calls are complete, so that the choice can end."""
        return self.calls == self._calls_max and self._state in ("tail", "after")

    def push(self, text: str) -> Parsed:
        """Add a piece of text. Return the plain text and the calls that it completes."""
        for character in text:
            if self.is_full:
                break
            self._state = self._next(character)
        return self._take()

    def flush(self) -> Parsed:
        """End the text. An incomplete call becomes text; white space around calls is dropped."""
        if self._state in ("start", "text", "before", "head"):
            self._text.append(self._take_held())
        self._take_held()
        return self._take()

    def _next(self, character: str) -> State:
        match self._state:
            case "start":
                return self._at_start(character)
            case "text":
                return self._in_text(character)
            case "before":
                return self._before(character)
            case "head":
                return self._in_head(character)
            case "arguments":
                self._fragment.append(character)
                return "tail" if self._end.push(character) else "arguments"
            case "tail":
                return "after" if character == "}" else "tail"
            case "after":
                return self._after(character)

    def _take(self) -> Parsed:
        self._end_fragment()
        parsed = Parsed("".join(self._text), tuple(self._parts))
        self._text, self._parts = [], []
        return parsed

    def _end_fragment(self) -> None:
        if not self._fragment:
            return
        index, arguments, self._fragment = self.calls - 1, "".join(self._fragment), []
        first = self._parts.pop() if self._parts and self._parts[-1].index == index else CallPart(index, "")
        self._parts.append(replace(first, arguments=first.arguments + arguments))

    def _at_start(self, character: str) -> State:
        """Hold back leading white space, in a format whose calls need no mark."""
        if character == "{":
            return self._begin(character)
        if not character.isspace():
            return self._in_text(character)
        self._held.append(character)
        return "start"

    def _in_text(self, character: str) -> State:
        """Hold back the beginning of a mark, and the white space before it, which belongs to the call."""
        mark = self._form.opening
        if not self._held and character != mark[0] and not character.isspace():
            self._text.append(character)
            return "text"
        self._held.append(character)
        if not self._candidate and character.isspace():
            return "text"
        self._candidate += character
        if self._candidate == mark:
            self._candidate = ""
            return "before"
        text = self._candidate
        safe = next(start for start in range(len(text) + 1) if mark.startswith(text[start:].lstrip()))
        if safe:
            kept = len(self._held) - (len(text) - safe)
            self._text += self._held[:kept]
            self._held, self._candidate = self._held[kept:], text[safe:].lstrip()
        return "text"

    def _before(self, character: str) -> State:
        """Handle the characters between a mark and its object: white space and the bracket of a list."""
        if character == "{":
            return self._begin(character)
        self._held.append(character)
        return "before" if character.isspace() or character == "[" else self._give_back()

    def _begin(self, character: str) -> State:
        self._object, self._end = character, JsonEnd()
        self._end.push(character)
        return "head"

    def _in_head(self, character: str) -> State:
        """Collect the JSON of a call until its arguments begin."""
        complete = self._end.push(character)
        if character == "{" and self._end.depth == 2 and (name := self._name_before()) is not None:
            self._open(name)
            self._fragment.append(character)
            self._end = JsonEnd()
            self._end.push(character)
            return "arguments"
        self._object += character
        return self._read_whole() if complete else "head"

    def _name_before(self) -> str | None:
        """Return the call's name if the arguments begin here. None: they do not, or the text is not JSON."""
        found = self._head.fullmatch(self._object)
        name = _read(found[1]) if found else None
        return name if isinstance(name, str) else None

    def _read_whole(self) -> State:
        """Parse a complete object: a call whose name follows its arguments, or an object that is not a call."""
        call = _read(self._object)
        if not isinstance(call, dict):
            return self._give_back()
        name, arguments = call.get("name"), call.get(self._form.arguments, {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return self._give_back()
        self._open(name)
        self._fragment.append(json.dumps(arguments, ensure_ascii=False))
        return "after"

    def _open(self, name: str) -> None:
        self._end_fragment()
        self._parts.append(CallPart(self.calls, "", call_id(f"{self._name}:{self.calls}"), name))
        self.calls += 1
        self._take_held()

    def _after(self, character: str) -> State:
        """Handle the characters after a call: the closing mark, the next call, or text."""
        self._held.append(character)
        if not self._candidate and character in _BETWEEN:
            return "after"
        self._candidate += character
        rest = self._candidate.strip(_BETWEEN)
        if rest == "{":
            self._take_held()
            return self._begin(character)
        if rest == self._form.closing:
            self._take_held()
        elif not self._form.closing.startswith(rest):
            return self._give_back()
        return "after"

    def _give_back(self) -> State:
        """Turn the held text, which is not a call, into plain text, except for an end that may begin a mark."""
        held = self._take_held()
        mark = self._form.opening
        if mark in held:
            self._text.append(held)
            return "text"
        for character in held:
            self._state = self._in_text(character)
        return self._state

    def _take_held(self) -> str:
        """Return the held text and clear it."""
        held = "".join(self._held) + self._object
        self._held, self._candidate, self._object = [], "", ""
        return held
