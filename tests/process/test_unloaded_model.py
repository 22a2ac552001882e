"""The memory that an unloaded model leaves in the server."""

from __future__ import annotations

import asyncio
import weakref

from baton.core.config import Config, Topology
from baton.core.kv_config import KVConfig
from baton.core.served_model import ServedModelConfig
from baton.serve.live.several_models import assemble_models
from baton.serve.model_fleet import ServerFacts
from baton.serve.models import Models


async def _run() -> None:
    config = Config(model="hash:a", topology=Topology(mixed=1), kv=KVConfig(blocks=8))
    facts = ServerFacts(url="", join_url="", tls=None, tell=lambda _line: None)
    models = Models(config, assemble_models(config), facts, changed=lambda: None)
    try:
        await models.start()
        await models.load(ServedModelConfig(model="hash:b", mixed=1))
        tokenizer = weakref.ref(models.served["hash-b"].tokenizer)
        await models.unload("hash-b")
        assert tokenizer() is None
    finally:
        await models.close()


def test_the_tokenizer_of_an_unloaded_model_is_freed_at_once() -> None:
    """A large vocabulary must not wait for the garbage collector."""
    asyncio.run(_run())
