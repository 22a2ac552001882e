"""Servers that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.store.node import StoreNode
from tests.serving import RunningServer, serving
from tests.stores import BLOCK_BYTES


@pytest.fixture(scope="session")
def hash_server() -> Iterator[RunningServer]:
    """A real server of the hash model: 1 prefill + 1 decode worker, no weights, no torch."""
    with serving("hash") as server:
        yield server


@pytest.fixture(scope="session")
def smollm_server() -> Iterator[RunningServer]:
    """A real server of the embedded model in float32: 1 prefill + 1 decode worker."""
    with serving("--dtype", "float32") as server:
        yield server


@pytest.fixture
def node() -> Iterator[StoreNode]:
    """A pool node in this process, with room for ten blocks."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
    yield node
    node.close()
