"""Put the same instructions before every conversation.

[[hooks.request]]
use = "examples.hooks.system_prompt:SystemPrompt"
options = { text = "Answer in one sentence." }
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A request hook: the first message of every chat is ours."""

    text: str

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        """Leave completions, and bodies that are no chat, as they are: the server refuses what is wrong with them."""
        messages = body.get("messages")
        if route != "/v1/chat/completions" or not isinstance(messages, list):
            return body
        return body | {"messages": [{"role": "system", "content": self.text}, *messages]}
