"""A small random model of floats: a server of it starts in a quarter of the time of the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers

from tests.process.test_models import save_with_bytes
from tests.serving import RunningServer, serving
from tests.unit.compute.models import TINY

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 2048}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a random Llama of 8 heads on 4 KV heads, which two ranks can share."""
    folder = tmp_path_factory.mktemp("llama")
    save_with_bytes(transformers.LlamaConfig(**TINY | HEADS), folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_server(tiny_model: str) -> Iterator[RunningServer]:
    """A server of the small model in float32: 1 prefill + 1 decode worker."""
    with serving(tiny_model, "--dtype", "float32") as server:
        yield server
