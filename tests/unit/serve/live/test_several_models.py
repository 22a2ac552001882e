"""The parts of several models on one host: their cores, their memory, their names and their logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import Config
from baton.core.errors import BatonError, ConfigError
from baton.core.kv_config import KVConfig
from baton.core.served_model import ServedModelConfig
from baton.move.cores import own_cores
from baton.move.memory_limits import memory_free_bytes
from baton.serve.host.sizing import divide_cores
from baton.serve.live.assembly import Parts
from baton.serve.live.several_models import assemble_models, assemble_table

A, B = ServedModelConfig(model="hash:a", mixed=1), ServedModelConfig(model="hash:b", mixed=1)
KV = KVConfig(blocks=8)
LARGEST_BLOCK = 1024
BLOCK_BYTES = hash_card().layout(block_tokens=LARGEST_BLOCK, dtype="uint8").block_bytes


def _most_of_the_memory() -> KVConfig:
    return KVConfig(blocks=int(0.6 * memory_free_bytes()) // BLOCK_BYTES, block_tokens=LARGEST_BLOCK)


@pytest.fixture
def made() -> Iterator[list[Parts]]:
    """The parts of a test, closed after it."""
    parts: list[Parts] = []
    yield parts
    for each in parts:
        if each.driver.log is not None:
            each.driver.log.close()
        assert each.own is not None
        each.own.arena.close()


def test_each_model_has_its_name_its_log_and_its_workers(made: list[Parts], tmp_path: Path) -> None:
    made += assemble_models(Config(models=(A, B), kv=KV, log=str(tmp_path / "run.log")))
    assert [parts.card.name for parts in made] == ["hash-a", "hash-b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.hash-a.log", "run.hash-b.log"]
    assert [len(parts.own.setups) for parts in made if parts.own is not None] == [1, 1]


@pytest.mark.skipif(len(own_cores()) < 2, reason="two models cannot own a core each")
@pytest.mark.parametrize("idle_cores", ["lend", "keep"])
def test_a_model_borrows_the_cores_of_another_one_that_sleeps(
    made: list[Parts], idle_cores: Literal["lend", "keep"]
) -> None:
    made += assemble_models(Config(models=(A, B), kv=KV, idle_cores=idle_cores))
    (first,), (second,) = (parts.own.setups for parts in made if parts.own is not None)
    assert first.cores
    assert set(first.cores).isdisjoint(second.cores)
    lent = (second.cores, first.cores) if idle_cores == "lend" else ((), ())
    assert (first.guest_cores, second.guest_cores) == lent


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models are named 'hash-a'"):
        assemble_models(Config(models=(A, A), kv=KV))


def test_a_model_without_a_name_of_its_own_does_not_take_a_further_name_of_the_first(made: list[Parts]) -> None:
    server = Config(model="hash:a", served_aliases=("hash-b",), kv=KV)
    made += assemble_models(server)
    with pytest.raises(ConfigError, match="two models are named 'hash-b'"):
        assemble_table(server, B, made)


def test_the_kv_caches_of_all_models_fit_into_the_free_memory() -> None:
    """Each fits alone. Their pages are untouched, so that the system shows all of the memory as free."""
    with pytest.raises(ConfigError, match="KV caches of other models"):
        assemble_models(Config(models=(A, B), kv=_most_of_the_memory()))


def test_a_model_that_is_loaded_later_counts_the_memory_of_the_first(made: list[Parts]) -> None:
    server = Config(model="hash:a", kv=_most_of_the_memory())
    made += assemble_models(server)
    with pytest.raises(ConfigError, match="KV caches of other models"):
        assemble_table(server, B, made)
    made.append(assemble_table(server, ServedModelConfig(model="hash:b", kv={"blocks": 8}), made))


def test_a_model_that_wants_more_cores_than_are_free_is_refused(made: list[Parts]) -> None:
    server = Config(model="hash:a", kv=KV)
    made += assemble_models(server)
    with pytest.raises(BatonError, match=f"wants 1 cores, but 0 of {len(own_cores())} are free"):
        assemble_table(server, ServedModelConfig(model="hash:b", cores=1), made)


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ([0], [(0, 1, 2, 3)]),
        ([0, 0], [(0, 1), (2, 3)]),
        ([3, 0], [(0, 1, 2), (3,)]),
        ([0, 1, 0], [(1,), (0,), (2,)]),
        ([2, 2], [(0, 1), (2, 3)]),
        ([0] * 5, [(0,), (1,), (2,), (3,), (0,)]),
    ],
)
def test_cores_are_divided_among_models(wanted: list[int], parts: list[tuple[int, ...]]) -> None:
    assert divide_cores(wanted, range(4)) == parts


@pytest.mark.parametrize("wanted", [[5], [3, 2], [4, 0]])
def test_more_cores_than_there_are_cannot_be_named(wanted: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"name {sum(wanted)} cores.*has 4"):
        divide_cores(wanted, range(4))
