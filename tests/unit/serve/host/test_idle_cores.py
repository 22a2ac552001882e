"""The cores that a worker may borrow while their owner sleeps."""

from __future__ import annotations

import os

import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, Topology
from baton.core.kv_config import KVConfig
from baton.core.types import HostId
from baton.serve.host.build import build_host, choose_computing
from baton.serve.messages.setup import WorkerSetup


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers cannot own a core each")
def test_two_workers_lend_each_other_their_cores() -> None:
    prefill, decode = _setups(Config(topology=Topology(prefill=1, decode=1), kv=KVConfig(blocks=4)))
    assert (prefill.guest_cores, decode.guest_cores) == (decode.cores, prefill.cores)
    assert prefill.guest_cores


def test_idle_cores_keep_lends_nothing() -> None:
    config = Config(topology=Topology(prefill=1, decode=1), kv=KVConfig(blocks=4), idle_cores="keep")
    assert [setup.guest_cores for setup in _setups(config)] == [(), ()]


def test_a_worker_alone_has_nobody_to_lend_to() -> None:
    assert [setup.guest_cores for setup in _setups(Config(topology=Topology(mixed=1), kv=KVConfig(blocks=4)))] == [()]


def _setups(config: Config) -> list[WorkerSetup]:
    card = hash_card()
    host = build_host(config, card, choose_computing(config, card), HostId("host-0"))
    host.arena.close()
    return host.setups
