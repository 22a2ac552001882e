"""What the routes share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.engine.chat_template import ChatTemplate
from baton.engine.tokenizer import Tokenizer
from baton.server.hooks import Hooks
from baton.server.port import Gateway
from baton.server.settings import HttpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that answering requests needs."""

    gateway: Gateway
    tokenizer: Tokenizer
    template: ChatTemplate
    settings: HttpSettings
    hooks: Hooks
    render_metrics: Callable[[], bytes]
    seeds: random.Random
    """Draws the seeds of requests that have none."""
    started_unix_s: int
    serials: itertools.count[int] = field(default_factory=itertools.count)
    """Makes request ids unique, whatever clients send."""
