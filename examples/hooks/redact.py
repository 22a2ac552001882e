"""Mask e-mail addresses in what the model says, also when one comes in several pieces.

[[hooks.output]]
use = "examples.hooks.redact:RedactEmail"
options = { mask = "[e-mail]" }
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")
_WORD_END = re.compile(r"[^A-Za-z0-9._%+@-]")
WORD_CHARACTERS_MAX = 320
"""No address is longer, so more than that is never kept back."""


@dataclass(frozen=True, slots=True)
class RedactEmail:
    """An output hook: one filter per choice."""

    mask: str = "[e-mail]"

    def begin(self, body: Mapping[str, Any], route: str) -> EmailFilter:
        return EmailFilter(self.mask)


@dataclass(slots=True)
class EmailFilter:
    """Keeps the last word back until something ends it: only then is it known to be an address or not."""

    mask: str
    _word: str = ""

    def push(self, text: str) -> str:
        text = self._word + text
        ends = [match.end() for match in _WORD_END.finditer(text)]
        out = max(ends[-1] if ends else 0, len(text) - WORD_CHARACTERS_MAX)
        self._word = text[out:]
        return _EMAIL.sub(self.mask, text[:out])

    def flush(self) -> str:
        word, self._word = self._word, ""
        return _EMAIL.sub(self.mask, word)
