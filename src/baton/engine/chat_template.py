"""Placeholder while the real one is being written."""

from __future__ import annotations

from typing import Any
from collections.abc import Sequence


class PlainTemplate:
    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return text + ("assistant: " if add_generation_prompt else "")


def load_chat_template(card) -> PlainTemplate:  # noqa: ANN001
    return PlainTemplate()
