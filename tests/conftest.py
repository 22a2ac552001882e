"""What all tests share: one profile for every property, and servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from baton.move.store.node import StoreNode
from tests.serving import RunningServer, serving
from tests.stores import BLOCK_BYTES

# The same examples on every run, so that a red build is red again; and no deadline, for no test asserts a time.
settings.register_profile(
    "house",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    print_blob=False,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("house")


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
