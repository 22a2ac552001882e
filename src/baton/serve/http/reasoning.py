"""Separate a model's reasoning from its answer: the text between `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from typing import Literal

OPENING, CLOSING = "<think>", "</think>"
State = Literal["start", "inside", "closed", "answer"]


class ReasoningSplitter:
    """Splits the text of one choice as it streams. White space around the reasoning is dropped.

    The result does not depend on how the text was split into pieces.
    """

    def __init__(self, prompt: str, *, is_constrained: bool, is_kept: bool) -> None:
        """`prompt`: the rendered conversation, which may open the reasoning itself, or have closed it.

        `is_constrained`: a grammar decides the text, so the model cannot reason inside of an opened reasoning.
        `is_kept`: False drops the reasoning.
        """
        end = prompt.rstrip()
        self._state: State = "start"
        if end.endswith(CLOSING) or (end.endswith(OPENING) and is_constrained):
            self._state = "answer"
        elif end.endswith(OPENING):
            self._state = "inside"
        self._is_kept = is_kept
        self._has_begun = False
        """Whether the reasoning has text, so that white space belongs to it."""
        self._held = ""
        """White space and a part of a mark, which may belong to neither text."""

    def push(self, text: str) -> tuple[str, str]:
        """Add a piece of text. Return the reasoning and the answer that are certain now."""
        if self._state == "answer":
            return "", text
        reasoning, self._held = "", self._held + text
        if self._state == "start":
            self._start()
        if self._state == "inside":
            reasoning = self._inside()
        return reasoning if self._is_kept else "", self._answer()

    def flush(self) -> tuple[str, str]:
        """End the text. Return what was held back."""
        held, self._held = self._held, ""
        if self._state == "start":
            return "", held
        return (held.rstrip() if self._state == "inside" and self._is_kept else ""), ""

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self._state, self._held = "inside", begun.removeprefix(OPENING)
        elif not OPENING.startswith(begun):
            self._state = "answer"

    def _inside(self) -> str:
        """Return the reasoning that is certain. It ends at the closing mark."""
        text, mark, rest = self._held.partition(CLOSING)
        if not self._has_begun:
            text = text.lstrip()
        if mark:
            self._state, self._held = "closed", rest
            return text.rstrip()
        kept = len(text) - _mark_part(text)
        kept = len(text[:kept].rstrip())
        self._held = text[kept:]
        self._has_begun = self._has_begun or kept > 0
        return text[:kept]

    def _answer(self) -> str:
        if self._state == "closed":
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "closed"
        if self._state != "answer":
            return ""
        text, self._held = self._held, ""
        return text


def _mark_part(text: str) -> int:
    """Return the length of the longest end of a text that may begin the closing mark."""
    most = min(len(text), len(CLOSING) - 1)
    return next((size for size in range(most, 0, -1) if CLOSING.startswith(text[-size:])), 0)
