"""What is wrong in a configuration is told before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.config import Config, Plugin, PolicyConfig
from baton.core.errors import ConfigError
from baton.engine.resolve import resolve_model
from baton.server.assembly import assemble


@pytest.mark.parametrize(
    ("use", "options", "words"),
    [
        ("baton.policy.batching:SloChunkd", {}, "did you mean"),
        ("baton.policy.batching:SloChunked", {"foo": 1}, "unknown option 'foo'"),
        ("baton.policy.roles:StaticRoles", {}, "is no BatchingPolicy"),
    ],
)
def test_a_batching_policy_that_does_not_fit_is_told_at_the_start(
    use: str, options: dict[str, Any], words: str
) -> None:
    """Only workers ask it; without the check they would die of it, one after the other, until none is left."""
    config = Config(model="hash", policy=PolicyConfig(batching=Plugin(use=use, options=options)))
    with pytest.raises(ConfigError, match=words):
        assemble(config, resolve_model("hash"))
