"""Sizing of a host: workers, cores and blocks, on any machine."""

from __future__ import annotations

import math
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, Topology
from baton.core.errors import ConfigError
from baton.core.kv_config import KVConfig
from baton.core.types import HostId
from baton.decide.kv.layout import KVLayout
from baton.move.cores import usable_cores
from baton.serve.host.sizing import (
    blocks_total,
    host_budget,
    memory_budget,
    memory_free_bytes,
    neighbour_cores,
    share_cores,
    worker_views,
    workers_max,
)

HOST = HostId("h")
CARD = hash_card()
LAYOUT = CARD.layout(block_tokens=16, dtype="uint8")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def names(topology: Topology) -> list[str]:
    return [view.id for view in worker_views(topology, HOST)]


def test_nothing_asked_for_is_one_prefill_and_one_decode_worker() -> None:
    assert names(Topology()) == ["prefill-0", "decode-0"]


def test_a_role_that_is_not_named_has_no_worker_once_another_is() -> None:
    assert names(Topology(mixed=1)) == ["mixed-0"]
    assert names(Topology(prefill=2, decode=1, mixed=1)) == ["prefill-0", "prefill-1", "decode-0", "mixed-0"]


def test_workers_know_their_role_and_host() -> None:
    views = worker_views(Topology(prefill=1, mixed=1), HOST)
    assert [(view.role, view.host) for view in views] == [("prefill", HOST), ("mixed", HOST)]


@given(workers=st.integers(1, 2 * CORES + 1), threads=st.integers(0, CORES + 1))
def test_no_core_has_two_owners(workers: int, threads: int) -> None:
    """Either every worker is pinned to as many cores as it has threads, or none is pinned."""
    shares = share_cores(workers, threads)
    assert len(shares) == workers
    assert {each for each, _ in shares} == {threads or max(1, CORES // workers)}
    owned = [core for _, cores in shares for core in cores]
    assert len(owned) == len(set(owned))
    if hasattr(os, "sched_getaffinity"):
        assert set(owned) <= os.sched_getaffinity(0)
        fits = sum(each for each, _ in shares) <= CORES
        assert [len(cores) for _, cores in shares] == [each if fits else 0 for each, _ in shares]


@given(workers=st.integers(1, 2 * CORES + 1), threads=st.integers(0, CORES + 1))
def test_a_core_has_one_guest_at_most_and_never_its_owner(workers: int, threads: int) -> None:
    shares = share_cores(workers, threads)
    guests = neighbour_cores(shares)
    assert len(guests) == workers
    lent = [core for cores in guests for core in cores]
    assert len(lent) == len(set(lent))
    assert all(not set(own) & set(lent_here) for (_, own), lent_here in zip(shares, guests, strict=True))


def test_of_two_workers_each_may_use_the_others_cores() -> None:
    assert neighbour_cores([(2, (0, 1)), (2, (2, 3))]) == [(2, 3), (0, 1)]


def test_workers_without_cores_of_their_own_lend_none() -> None:
    assert neighbour_cores([(4, ()), (4, ())]) == [(), ()]


@given(workers=st.integers(1, 4), quota=st.floats(0.01, CORES, exclude_max=True))
def test_under_a_quota_there_are_threads_for_that_much_time_and_nobody_is_pinned(workers: int, quota: float) -> None:
    """The cores are others' too: who has the same quota on the same cores would pin to the same ones."""
    each = max(1, math.ceil(quota) // workers)
    assert share_cores(workers, 0, quota) == [(each, ())] * workers
    assert share_cores(workers, 3, quota) == [(3, ())] * workers, "who asks for threads gets them"


def test_a_quota_of_all_cores_is_none() -> None:
    assert share_cores(1, 0, float(CORES)) == share_cores(1, 0)


def test_one_worker_owns_all_cores() -> None:
    (share,) = share_cores(1, 0)
    assert share[0] == CORES


def test_a_size_in_blocks_goes_before_one_in_bytes() -> None:
    config = Config(kv=KVConfig(blocks=77, bytes=10 * LAYOUT.block_bytes))
    assert blocks_total(config, CARD, LAYOUT, host_budget()) == 77


def test_a_size_in_bytes_is_cut_to_whole_blocks() -> None:
    config = Config(kv=KVConfig(bytes=10 * LAYOUT.block_bytes + LAYOUT.block_bytes - 1))
    assert blocks_total(config, CARD, LAYOUT, host_budget()) == 10


def test_an_arena_of_less_than_two_blocks_is_refused_with_what_to_give() -> None:
    config = Config(kv=KVConfig(bytes=2 * LAYOUT.block_bytes - 1))
    with pytest.raises(ConfigError, match=f"give at least {2 * LAYOUT.block_bytes}"):
        blocks_total(config, CARD, LAYOUT, host_budget())
    assert blocks_total(Config(kv=KVConfig(bytes=2 * LAYOUT.block_bytes)), CARD, LAYOUT, host_budget()) == 2


def test_a_small_model_gets_no_more_than_64_contexts() -> None:
    """2 GiB of the hash model would be four million blocks that nobody can fill."""
    contexts = 64 * CARD.context_tokens // LAYOUT.block_tokens
    assert blocks_total(Config(), CARD, LAYOUT, host_budget()) == contexts


def test_a_part_of_a_block_counts_as_a_block_of_the_context() -> None:
    card = msgspec.structs.replace(CARD, context_tokens=17)
    assert blocks_total(Config(), card, LAYOUT, host_budget()) == 64 * 2


LARGE = KVLayout(layers=128, kv_heads=128, head_dim=256, block_tokens=16, dtype="float32")
LARGE_CARD = msgspec.structs.replace(CARD, context_tokens=2**24)
"""A model whose one context is larger than this machine."""


def test_by_default_never_more_than_half_of_the_free_memory() -> None:
    taken_bytes = blocks_total(Config(), LARGE_CARD, LARGE, host_budget()) * LARGE.block_bytes
    assert taken_bytes <= memory_free_bytes() * 0.6


@pytest.mark.parametrize("total_gib", [8, 16, 64, 1024])
def test_a_restarted_host_is_as_large_as_before(total_gib: int) -> None:
    """The memory of the one that was killed is not free yet when the next one measures."""
    total_bytes = total_gib << 30
    free_bytes = total_bytes - (1 << 30)
    before = blocks_total(Config(), LARGE_CARD, LARGE, memory_budget(free_bytes=free_bytes, total_bytes=total_bytes))
    assert before * LARGE.block_bytes > total_bytes // 5
    held_bytes = before * LARGE.block_bytes
    left = memory_budget(free_bytes=free_bytes - held_bytes, total_bytes=total_bytes)
    assert blocks_total(Config(), LARGE_CARD, LARGE, left) == before


def test_an_arena_beyond_the_free_memory_is_refused_before_anything_starts() -> None:
    """Memory is reserved by use: it would be noticed under load, by the kernel."""
    layout = KVLayout(layers=128, kv_heads=128, head_dim=256, block_tokens=16, dtype="float32")
    with pytest.raises(ConfigError, match="or --kv-blocks to at most"):
        blocks_total(Config(kv=KVConfig(blocks=2**31)), CARD, layout, host_budget())


def test_a_host_states_how_many_workers_it_can_run() -> None:
    """Cores bound the number, memory bounds it, and the initial workers run in any case."""
    few = {"worker_bytes": 0, "shared_bytes": 0}
    assert workers_max(1, threads=1, is_on_gpu=False, **few) == max(1, usable_cores())
    assert workers_max(1, threads=usable_cores(), is_on_gpu=False, **few) == 1
    assert workers_max(3, threads=2 * usable_cores(), is_on_gpu=False, **few) == 3
    assert workers_max(2, threads=1, worker_bytes=2**60, shared_bytes=0, is_on_gpu=False) == 2
    assert workers_max(1, threads=1, worker_bytes=0, shared_bytes=memory_free_bytes(), is_on_gpu=False) == 1
    assert workers_max(2, threads=1, is_on_gpu=True, **few) == 2
