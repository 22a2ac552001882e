"""The bytes of a vLLM worker: copy KV blocks between its cache and Baton's store.

Reads run in a thread while vLLM computes other requests. Writes copy each layer's part of the blocks out of the cache
as soon as vLLM has computed that layer, so vLLM may use the blocks again after the step. They reach the store in a
thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b

import torch

from baton.core.types import BlockHash
from baton.decide.kv.hashing import HASH_BYTES
from baton.integrations.vllm.block_plan import BlockCopy, StepCopies
from baton.move.store.port import Store

log = logging.getLogger("baton.store")

_READ_BYTES = 64 << 20
"""Bytes of blocks that are read at a time. The copy of those that were found takes as much memory again."""
_WRITES_MAX = 8
"""Steps whose writes have not ended. The next one waits, which bounds the memory of the copies."""


class BlockCopies:
    """Moves blocks between the cache of one worker and a store. Blocks are the first axis of every layer's tensor."""

    def __init__(self, store: Store, layers: Mapping[str, torch.Tensor], *, rank: int) -> None:
        """`rank`: of the worker in its group. Ranks hold different parts of each block, under different hashes."""
        self._store = store
        self._layers = {name: layers[name] for name in sorted(layers)}
        self._copied: dict[str, _LayerParts] = {}
        """Parts of this step's blocks that are copied already, by layer."""
        self._rank = rank
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-write")
        self._writes = threading.BoundedSemaphore(_WRITES_MAX)
        self._reads: dict[str, Future[set[int]]] = {}
        """By request: the blocks that could not be read."""
        self._failed: set[int] = set()

    @property
    def block_bytes(self) -> int:
        return block_bytes([*self._layers.values()])

    def begin_reads(self, copies: StepCopies) -> None:
        """Begin the reads of a step."""
        for request_id, reads in copies.reads.items():
            self._reads[request_id] = self._reader.submit(self._read, reads)

    def copy_layer(self, name: str, copies: StepCopies) -> None:
        """Begin to copy one layer's part of the blocks that a step fills. Call it when vLLM has computed the layer."""
        layer = self._layers.get(name)
        if layer is not None and (copies.awaited or copies.writes):
            self._copied[name] = _LayerParts(layer, copies)

    def write(self, copies: StepCopies) -> None:
        """Store the blocks of a step. Wait until those that another server awaits are stored.

        Layers without a call of `copy_layer` are copied now: vLLM makes none where a CUDA graph has the whole step.
        """
        if not copies.awaited and not copies.writes:
            return
        copied, self._copied = self._copied, {}
        parts = [copied.get(name) or _LayerParts(layer, copies) for name, layer in self._layers.items()]
        _synchronize(next(iter(self._layers.values())))  # the parts arrive in host memory
        awaited = self._begin_write(copies.awaited, [part.awaited for part in parts])
        self._begin_write(copies.writes, [part.writes for part in parts])
        if awaited is not None:
            awaited.result()

    def ended_reads(self) -> set[str]:
        """Return requests whose reads have ended since the last call."""
        ended = {request_id for request_id, read in self._reads.items() if read.done()}
        for request_id in ended:
            self._failed |= self._reads.pop(request_id).result()
        return ended

    def take_failed(self) -> set[int]:
        """Return the blocks of ended reads that could not be read. vLLM computes them."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """End all copies, and close the store."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._store.close()

    def _read(self, reads: Sequence[BlockCopy]) -> set[int]:
        """Read blocks into the cache. Return those that the store lacks, or all if the store or a copy fails."""
        size, missing = max(1, _READ_BYTES // self.block_bytes), set[int]()
        try:
            for start in range(0, len(reads), size):
                missing |= self._read_piece(reads[start : start + size])
        except Exception:  # the engine would end with it
            log.exception("KV blocks of a request were not read: vLLM computes them")
            return {copy.block for copy in reads}
        return missing

    def _read_piece(self, reads: Sequence[BlockCopy]) -> set[int]:
        memory = torch.empty((len(reads), self.block_bytes), dtype=torch.uint8)
        keys = [rank_hash(copy.block_hash, self._rank) for copy in reads]
        found = self._store.get([(key, row.data) for key, row in zip(keys, memory.numpy(), strict=True)])
        here = [index for index, is_found in enumerate(found) if is_found]
        if here:
            self._fill([reads[index].block for index in here], memory[here])
        return {copy.block for copy, is_found in zip(reads, found, strict=True) if not is_found}

    def _fill(self, blocks: Sequence[int], memory: torch.Tensor) -> None:
        start = 0
        layers = [*self._layers.values()]
        for layer in layers:
            size = layer[0].numel() * layer.element_size()
            part = memory[:, start : start + size].contiguous()
            layer[list(blocks)] = part.view(layer.dtype).view(len(blocks), *layer.shape[1:]).to(layer.device)
            start += size
        _synchronize(layers[0])

    def _begin_write(self, writes: Sequence[BlockCopy], parts: Sequence[torch.Tensor]) -> Future[None] | None:
        """Store blocks in a thread. `parts`: their bytes of each layer, [blocks, bytes]."""
        if not writes:
            return None
        memory = torch.cat([*parts], dim=1)
        keys = [rank_hash(copy.block_hash, self._rank) for copy in writes]
        self._writes.acquire()
        return self._writer.submit(self._put, keys, memory)

    def _put(self, keys: Sequence[BlockHash], memory: torch.Tensor) -> None:
        try:
            self._store.put([(key, row.data) for key, row in zip(keys, memory.numpy(), strict=True)])
        except Exception:  # the engine would end with it
            log.exception("KV blocks of a step were not stored")
        finally:
            self._writes.release()


class _LayerParts:
    """One layer's bytes of the blocks that a step fills, in host memory, [blocks, bytes]."""

    def __init__(self, layer: torch.Tensor, copies: StepCopies) -> None:
        """Begin the copies. Copies from a GPU are complete once the current CUDA stream is synchronized."""
        self.awaited = _part(layer, copies.awaited)
        self.writes = _part(layer, copies.writes)


def _part(layer: torch.Tensor, copies: Sequence[BlockCopy]) -> torch.Tensor:
    blocks = torch.tensor([copy.block for copy in copies], dtype=torch.long, device=layer.device)
    part = layer[blocks].contiguous().view(len(copies), layer[0].numel()).view(torch.uint8)
    return part.to("cpu", non_blocking=True)


def _synchronize(layer: torch.Tensor) -> None:
    """Wait for the copies that this thread began on the layer's GPU. The thread's own device may be another one."""
    if layer.is_cuda:
        torch.cuda.current_stream(layer.device).synchronize()


def block_bytes(layers: Sequence[torch.Tensor]) -> int:
    """Return the bytes of one block over all layers."""
    return sum(layer[0].numel() * layer.element_size() for layer in layers)


def rank_hash(block: BlockHash, rank: int) -> BlockHash:
    """Return the name of a rank's part of a block. Rank 0 has the block's own hash."""
    if rank == 0:
        return block
    return BlockHash(blake2b(block + rank.to_bytes(4, "little"), digest_size=HASH_BYTES, person=b"baton-rank").digest())
