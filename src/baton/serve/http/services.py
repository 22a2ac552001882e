"""What the routes share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.compute.models.chat_template import ChatTemplate
from baton.compute.models.tokenizer import Tokenizer
from baton.serve.http.settings import HttpSettings
from baton.serve.live.hooks import Hooks
from baton.serve.live.port import Gateway


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
