"""The halves of vLLM's connector that need no vLLM: the plan of its scheduler, and the copies of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

import pytest
import torch

from baton.core.types import BlockHash
from baton.decide.kv.hashing import block_hashes
from baton.integrations.vllm.block_copies import BlockCopies, rank_hash
from baton.integrations.vllm.block_plan import BlockCopy, BlockPlan, StepCopies
from baton.move.store.memory import MemoryStore

PROMPT = list(range(100, 130))
HASHES = block_hashes(PROMPT, block_tokens=8)


def plan(*, hands_off: bool = False, salt: str = "") -> BlockPlan:
    """A plan with the request `r`: 30 tokens, 3 full blocks of 8."""
    made = BlockPlan(8)
    made.add("r", PROMPT, salt, hands_off=hands_off)
    return made


# ---- what is read


def test_stored_blocks_are_read_up_to_the_first_gap() -> None:
    made = plan()
    assert made.readable_tokens("r", 0, 0) == 0
    made.note_stored([HASHES[0], HASHES[2]])
    assert made.readable_tokens("r", 0, 0) == 8
    made.note_stored(HASHES)
    assert made.readable_tokens("r", 8, 0) == 16
    made.begin_reading("r", [50, 51, 52, 53])
    assert made.take() == StepCopies(reads={"r": [BlockCopy(51, HASHES[1]), BlockCopy(52, HASHES[2])]})
    assert made.take() == StepCopies()


def test_the_blocks_that_another_server_promises_are_read_without_a_list() -> None:
    assert plan().readable_tokens("r", 0, 16) == 16
    assert plan().readable_tokens("r", 0, 1000) == 24


def test_a_request_whose_read_has_failed_computes_and_writes_its_blocks() -> None:
    """vLLM asks again. The store may still list the blocks, or another server may have promised them."""
    made = plan()
    assert made.readable_tokens("r", 0, 24) == 24
    made.begin_reading("r", [50, 51, 52, 53])
    made.take()
    assert made.readable_tokens("r", 8, 24) == 0
    made.place("r", [50, 51, 52, 53], replaces=True)
    made.compute("r", 30)
    assert [copy.block for copy in made.take().writes] == [51, 52]


def test_the_last_token_of_a_prompt_is_computed() -> None:
    made = BlockPlan(10)
    made.add("r", PROMPT, "", hands_off=False)
    assert made.readable_tokens("r", 0, 30) == 20


def test_salted_requests_share_no_block_with_others() -> None:
    made = plan(salt="tenant")
    made.note_stored(HASHES)
    assert made.readable_tokens("r", 0, 0) == 0
    made.note_stored(block_hashes(PROMPT, block_tokens=8, cache_salt="tenant"))
    assert made.readable_tokens("r", 0, 0) == 24


def test_requests_that_were_not_added_are_ignored() -> None:
    made = plan()
    assert made.readable_tokens("other", 0, 24) == 0
    made.place("other", [1], replaces=True)
    made.compute("other", 8)
    assert made.end("other") == 0
    assert made.take() == StepCopies()


# ---- what is written


def test_full_blocks_are_written_once_in_the_step_that_fills_them() -> None:
    made = plan()
    made.place("r", [50, 51], replaces=True)
    made.compute("r", 12)
    assert made.take().writes == [BlockCopy(50, HASHES[0])]
    made.place("r", [52, 53], replaces=False)
    made.compute("r", 30)
    assert made.take().writes == [BlockCopy(51, HASHES[1]), BlockCopy(52, HASHES[2])]
    assert made.end("r") == 24


def test_blocks_that_are_stored_are_not_written_again() -> None:
    made = plan()
    made.note_stored(HASHES[:2])
    made.place("r", [50, 51, 52], replaces=True)
    made.compute("r", 30)
    assert made.take().writes == [BlockCopy(52, HASHES[2])]


def test_output_is_written_once_its_tokens_are_known() -> None:
    """vLLM may schedule a step before it knows the token that the step before has sampled."""
    tokens = [*PROMPT]
    made = BlockPlan(8)
    made.add("r", tokens, "", hands_off=False)
    made.place("r", [50, 51, 52, 53], replaces=True)
    made.compute("r", 32)
    assert len(made.take().writes) == 3
    tokens += [7, 8]
    made.compute("r", 33)
    assert made.take().writes == [BlockCopy(53, block_hashes(tokens, block_tokens=8)[3])]


def test_blocks_for_another_server_are_awaited() -> None:
    made = plan(hands_off=True)
    made.place("r", [50, 51, 52], replaces=True)
    made.compute("r", 30)
    assert [copy.block for copy in made.take().awaited] == [50, 51, 52]
    assert made.end("r") == 24


def test_blocks_after_a_preemption_replace_the_earlier_ones() -> None:
    made = plan()
    made.place("r", [50], replaces=True)
    made.compute("r", 8)
    made.place("r", [60, 61], replaces=True)
    made.compute("r", 16)
    assert made.take().writes == [BlockCopy(50, HASHES[0]), BlockCopy(61, HASHES[1])]


# ---- bytes


def cache(seed: int) -> dict[str, torch.Tensor]:
    """The cache of a worker: 2 layers, 6 blocks, 1 head, 8 tokens, 4 numbers."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 1, 8, 4, generator=made).to(torch.bfloat16) for name in ("layer.1", "layer.0")}


def copies(store: MemoryStore, layers: dict[str, torch.Tensor], rank: int = 0) -> BlockCopies:
    return BlockCopies(store, layers, rank=rank)


def memory() -> MemoryStore:
    return MemoryStore(block_bytes=2 * 8 * 4 * 2, capacity_bytes=1 << 20)


def read(reader: BlockCopies, *wanted: BlockCopy) -> set[int]:
    """Read blocks for one request. Return those that failed."""
    reader.begin_reads(StepCopies(reads={"r": [*wanted]}))
    wait(reader._reads.values())
    assert reader.ended_reads() == {"r"}
    assert reader.ended_reads() == set()
    return reader.take_failed()


@pytest.mark.parametrize("strided", [False, True])
def test_blocks_come_back_bit_by_bit_in_other_places(strided: bool) -> None:
    """The layers of the reader may have another order in memory."""
    store, source, target = memory(), cache(1), cache(2)
    if strided:
        target = {name: layer.transpose(1, 2).contiguous().transpose(1, 2) for name, layer in target.items()}
    untouched = {name: layer[:3].clone() for name, layer in target.items()}
    writer, reader = copies(store, source), copies(store, target)
    writer.write(StepCopies(awaited=[BlockCopy(1, HASHES[0]), BlockCopy(4, HASHES[1])]))
    assert read(reader, BlockCopy(5, HASHES[0]), BlockCopy(3, HASHES[1])) == set()
    for name, layer in target.items():
        assert torch.equal(layer[5], source[name][1])
        assert torch.equal(layer[3], source[name][4])
        assert torch.equal(layer[:3], untouched[name])


def test_a_layer_is_copied_once_it_is_computed_and_other_layers_after_the_step() -> None:
    """Later writes into a copied layer are not stored. Empty steps store nothing."""
    store, source, target = memory(), cache(1), cache(2)
    expected = source["layer.0"][1].clone()
    writer, step = copies(store, source), StepCopies(awaited=[BlockCopy(1, HASHES[0])])
    writer.copy_layer("layer.0", step)
    writer.copy_layer("another model's layer", step)
    source["layer.0"][1] = 0
    writer.write(step)
    assert read(copies(store, target), BlockCopy(3, HASHES[0])) == set()
    assert torch.equal(target["layer.0"][3], expected)
    assert torch.equal(target["layer.1"][3], source["layer.1"][1])
    writer.copy_layer("layer.0", StepCopies())
    writer.write(StepCopies())
    writer.write(StepCopies(awaited=[BlockCopy(1, HASHES[1])]))
    assert read(copies(store, target), BlockCopy(4, HASHES[1])) == set()
    assert not target["layer.0"][4].any(), "no part of an earlier step is used again"


def test_blocks_that_are_gone_are_reported_and_the_others_read() -> None:
    store, source, target = memory(), cache(1), cache(2)
    copies(store, source).write(StepCopies(awaited=[BlockCopy(1, HASHES[0])]))
    before = target["layer.0"][3].clone()
    reader = copies(store, target)
    assert read(reader, BlockCopy(2, HASHES[0]), BlockCopy(3, HASHES[1])) == {3}
    assert reader.take_failed() == set()
    assert torch.equal(target["layer.0"][2], source["layer.0"][1])
    assert torch.equal(target["layer.0"][3], before)


def test_a_block_may_be_used_again_while_its_copy_is_stored() -> None:
    store, source = memory(), cache(1)
    expected = {name: layer[1].clone() for name, layer in source.items()}
    writer, target = copies(store, source), cache(2)
    writer.write(StepCopies(writes=[BlockCopy(1, HASHES[0])]))
    for layer in source.values():
        layer[1] = 0
    writer._writer.shutdown()
    reader = copies(store, target)
    assert read(reader, BlockCopy(0, HASHES[0])) == set()
    assert all(torch.equal(target[name][0], expected[name]) for name in expected)


def test_ranks_keep_their_parts_under_different_hashes() -> None:
    names = {rank_hash(HASHES[0], rank) for rank in range(3)}
    assert HASHES[0] in names
    assert (len(names), {len(name) for name in names}) == (3, {16})
    assert BlockHash(HASHES[1]) not in names


class PiecesStore(MemoryStore):
    """Notes the number of blocks of each read. Raises an error at the read `fails_at`."""

    def __init__(self, *, fails_at: int) -> None:
        super().__init__(block_bytes=2 * 8 * 4 * 2, capacity_bytes=1 << 20)
        self.pieces: list[int] = []
        self.fails_at = fails_at

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        if len(self.pieces) == self.fails_at:
            raise OSError("the store has a fault")
        self.pieces.append(len(blocks))
        return super().get(blocks)


@pytest.mark.parametrize(("fails_at", "failed"), [(9, {1}), (1, {5, 3, 1})])
def test_a_read_has_bounded_memory_and_an_error_ends_no_engine(
    fails_at: int, failed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source, target = PiecesStore(fails_at=fails_at), cache(1), cache(2)
    monkeypatch.setattr("baton.integrations.vllm.block_copies._READ_BYTES", 300)
    copies(store, source).write(StepCopies(awaited=[BlockCopy(1, HASHES[0]), BlockCopy(4, HASHES[1])]))
    wanted = [BlockCopy(block, name) for block, name in zip((5, 3, 1), HASHES, strict=True)]
    assert read(copies(store, target), *wanted) == failed
    assert store.pieces == [2, 1][:fails_at]
    assert torch.equal(target["layer.0"][3], source["layer.0"][4])


def test_copies_are_awaited_on_the_gpu_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins on GPU 0, but the cache of another rank is on its own GPU."""
    awaited: list[torch.device | None] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.device = device

        def synchronize(self) -> None:
            awaited.append(self.device)

    class Layer(torch.Tensor):
        """A layer on the CPU that looks like one on a GPU."""

        is_cuda = True

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    made = copies(memory(), {name: layer.as_subclass(Layer) for name, layer in cache(1).items()})
    made.write(StepCopies(awaited=[BlockCopy(1, HASHES[0])]))
    assert read(made, BlockCopy(2, HASHES[0])) == set()
    assert awaited == 2 * [torch.device("cpu")]


class FullStore(MemoryStore):
    """Raises an error at each write."""

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        raise OSError("the store has a fault")


def test_an_error_of_a_write_ends_no_engine_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = copies(FullStore(block_bytes=2 * 8 * 4 * 2, capacity_bytes=1 << 20), cache(1))
    made.write(StepCopies(awaited=[BlockCopy(1, HASHES[0])], writes=[BlockCopy(4, HASHES[1])]))
    made.close()
    assert [record.message for record in caplog.records] == ["KV blocks of a step were not stored"] * 2
