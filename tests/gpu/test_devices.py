"""What only GPUs can show of copies and ranks: that the driver's copies are torch's bytes, and that NCCL adds up.

`make gpu` runs these; anywhere else they skip, those for several devices also where there is one.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena, create_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
from baton.move.arena.cuda_memory import CudaMemory
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.staged import StagedMemory
from baton.move.transport.tcp import TcpTransport
from tests.dummies import small
from tests.hosting import cluster
from tests.process.test_hosts import ask, text_of
from tests.serving import serving
from tests.transfers.kits import random_extents

pytestmark = pytest.mark.gpu
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPUs, 2 are needed")
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
SIZE_BYTES = 64 * LAYOUT.block_bytes
BODY = {"prompt": "The number seven comes after", "max_tokens": 24, "temperature": 0}
OPTIONS = ("--load-format", "dummy", "--dtype", "float32", "--context-tokens", "512")
RANK = """
import sys, torch
from baton.compute.ranks.process_groups import join_rendezvous, connect_ranks
from baton.compute.ranks.place import RankPlace
device = torch.device("cuda:1")
ranks = connect_ranks(RankPlace(rank=1, tensor=2, pipeline=1), join_rendezvous(int(sys.argv[1])), device)
assert ranks.summed(torch.full((3, 4), 2.0, device=device)).tolist() == [[3.0] * 4] * 3
assert ranks.joined(torch.full((2, 3), 1.0, device=device)) is None
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a single worker on the CPU."""
    model = small("llama-3.1-8b", tmp_path_factory.mktemp("model"))
    with serving(model, *OPTIONS, "--device", "cpu", "--mixed", "1") as server, server.client() as client:
        return text_of(ask(client, BODY))


@pytest.fixture
def arena(gpu: str) -> Iterator[CudaArena]:
    made = create_cuda_arena([(CudaDriver(int(gpu.removeprefix("cuda:"))), SIZE_BYTES)])
    yield made
    made.close()


def test_copies_out_and_in_have_the_bytes_of_torch(arena: CudaArena) -> None:
    data = torch.as_tensor(arena.memory, device="cuda:0")
    content = torch.randint(0, 256, (SIZE_BYTES,), dtype=torch.uint8)
    data.copy_(content)
    torch.cuda.synchronize()
    staged = StagedMemory(CudaMemory(arena.parts, LAYOUT), portion_bytes=100_000)
    extents = random_extents(random.Random(1), SIZE_BYTES, total_bytes=SIZE_BYTES // 2)
    spread = Spread(rows_of(extents), {0: staged})
    read = b"".join(bytes(view) for views in spread.read(0, spread.size_bytes, 100_000) for view in views)
    assert read == b"".join(bytes(content[e.offset_bytes : e.offset_bytes + e.size_bytes]) for e in extents)
    for views in spread.write(0, spread.size_bytes, 100_000):
        for view in views:
            view[:] = bytes(view.nbytes)
    for extent in extents:
        content[extent.offset_bytes : extent.offset_bytes + extent.size_bytes] = 0
    assert torch.equal(data.cpu(), content)
    del data
    staged.close()


def test_kv_goes_over_tcp_from_one_arena_to_another(arena: CudaArena) -> None:
    other = create_cuda_arena([(CudaDriver(0), SIZE_BYTES)])
    source, target = (torch.as_tensor(each.memory, device="cuda:0") for each in (arena, other))
    source.copy_(torch.randint(0, 256, (SIZE_BYTES,), dtype=torch.uint8))
    torch.cuda.synchronize()
    staged = [StagedMemory(CudaMemory(each.parts, LAYOUT)) for each in (arena, other)]
    transports = [TcpTransport("127.0.0.1:0") for _ in staged]
    for transport, memory in zip(transports, staged, strict=True):
        transport.register(memory)
    rng = random.Random(2)
    given, into = (random_extents(rng, SIZE_BYTES, total_bytes=SIZE_BYTES // 2) for _ in range(2))
    ticket = transports[0].offer(given, lease_s=60.0, checksum=True)
    transports[1].pull(ticket, into).wait(60)
    parts = [[each[e.offset_bytes : e.offset_bytes + e.size_bytes].cpu() for e in runs]
             for each, runs in ((source, given), (target, into))]  # fmt: skip
    assert torch.equal(torch.cat(parts[0]), torch.cat(parts[1]))
    del source, target
    for transport in transports:
        transport.close()
    for memory in staged:
        memory.close()
    other.close()


@pytest.mark.parametrize("places", ["cpu gpu", "gpu cpu", "gpu gpu"])
def test_a_host_on_a_gpu_decodes_what_a_host_on_the_cpu_prefilled(
    device: str, places: str, expected: str, tmp_path: Path
) -> None:
    """In both directions, with the text of one worker."""
    prefill, decode = (("--device", device if place == "gpu" else place) for place in places.split())
    hosts = {"a": ("--prefill", "1", *prefill), "b": ("--decode", "1", *decode)}
    with cluster(small("llama-3.1-8b", tmp_path), hosts, *OPTIONS) as (server, _):
        with server.client() as client:
            assert text_of(ask(client, BODY)) == expected
        assert server.metric("baton_handoff_bytes_total") > 0


@several
def test_ranks_add_up_over_nccl() -> None:
    from baton.compute.ranks.place import RankPlace
    from baton.compute.ranks.process_groups import connect_ranks, host_rendezvous

    meeting, device = host_rendezvous(), torch.device("cuda:0")
    other = subprocess.Popen([sys.executable, "-c", RANK, str(meeting.port)])
    ranks = connect_ranks(RankPlace(rank=0, tensor=2, pipeline=1), meeting, device)
    assert ranks.summed(torch.full((3, 4), 1.0, device=device)).tolist() == [[3.0] * 4] * 3
    joined = ranks.joined(torch.zeros((2, 3), device=device))
    assert joined is not None
    np.testing.assert_array_equal(joined.cpu(), [[0.0] * 3 + [1.0] * 3] * 2)
    assert other.wait(60) == 0


@several
def test_ranks_on_two_gpus_give_the_text_of_one(tmp_path: Path) -> None:
    model = (small("llama-3.1-8b", tmp_path), *OPTIONS)
    texts = []
    for more in ((), ("--pp", "2"), ("--tp", "2")):
        arguments = (*model, "--device", "cuda", "--prefill", "1", "--decode", "1", *more)
        with serving(*arguments) as server, server.client() as client:
            texts.append(text_of(ask(client, BODY)))
    assert texts[0] == texts[1] == texts[2]
