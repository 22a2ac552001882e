"""The cores of a worker's ranks."""

from __future__ import annotations

import msgspec
import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import Config, Topology
from baton.core.kv_config import KVConfig
from baton.core.types import HostId
from baton.serve.host.build import build_host, choose_computing
from baton.serve.messages.setup import WorkerSetup
from baton.serve.worker.rank_wire import rank_cores


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        ({"tensor_parallel": 2}, (4, 5, 6, 7), [(2, (4, 5)), (2, (6, 7))]),
        ({"data_parallel": 2}, (4, 5, 6, 7), [(2, (4, 5)), (2, (6, 7))]),
        ({"pipeline_parallel": 2}, (4, 5, 6, 7), [(4, (4, 5, 6, 7)), (4, (4, 5, 6, 7))]),  # stages take turns
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            (0, 1),
            [(1, (0,)), (1, (1,)), (1, (0,)), (1, (1,))],
        ),
        ({"tensor_parallel": 4}, (0, 1), [(1, (0, 1))] * 4),  # fewer cores than ranks: nobody owns one
        ({"tensor_parallel": 2}, (), [(1, ()), (1, ())]),
    ],
)
def test_ranks_of_a_stage_divide_the_cores_and_stages_share_them(
    ranks: dict[str, int], cores: tuple[int, ...], expected: list[tuple[int, tuple[int, ...]]]
) -> None:
    setup = msgspec.structs.replace(
        _setup(),
        threads=max(1, len(cores)),
        cores=cores,
        layout=hash_card().layout(block_tokens=4, dtype="uint8", **ranks),
    )
    assert [rank_cores(setup, rank) for rank in range(setup.layout.ranks)] == expected


def _setup() -> WorkerSetup:
    config, card = Config(topology=Topology(mixed=1), kv=KVConfig(blocks=4)), hash_card()
    host = build_host(config, card, choose_computing(config, card), HostId("host-0"))
    host.arena.close()
    return host.setups[0]
