"""A language model made of hashes: the KV of a token is a hash, the next token is a hash of all KV before it.

It runs in the real worker, arena, transports and server without weights and without torch, in microseconds. Any block
that is lost, swapped, stale or truncated changes the text. The text does not depend on the block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b, shake_128

import numpy as np

from baton.compute.models.card import ModelCard
from baton.compute.step_engine import Progress
from baton.core.spill import SPILLED_FROM
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import Sampling, TokenLogprob
from baton.decide.kv.layout import KVLayout, Shard

EOS_TOKEN = 0
BOS_TOKEN = 1
BYTE_TOKENS_FROM = 3
"""Token of byte 0: token 3 + b stands for byte b."""
VOCAB_TOKENS = BYTE_TOKENS_FROM + 256
CONTEXT_TOKENS = 4096
EOS_ONE_IN = 64
"""One token in 64 ends the text, so that lengths vary as in a chat."""
EMBEDDING_DIM = 16
TEXT_TOKENS = tuple(BYTE_TOKENS_FROM + byte for byte in range(ord(" "), ord("~") + 1))
"""Tokens that a text may have: printable ASCII, so that every token is a visible character."""


WINDOW_TOKENS = 256
"""The attention window of the windowed hash model."""


def windowed_hash_card() -> ModelCard:
    """Return the card of the hash model with an attention window, like models with sliding attention in all layers."""
    return hash_card("hash-window", window_tokens=WINDOW_TOKENS)


def hash_card(name: str = "hash", *, window_tokens: int | None = None, seed: str = "") -> ModelCard:
    """Return the card of the hash model: one layer with one head of 16 bytes, so K and V of a token are 32 bytes.

    `seed`: hash models with different seeds write different KV and text, as models with different weights do.
    """
    return ModelCard(
        name=name,
        path=seed,
        format="hash",
        architecture="hash",
        layers=1,
        kv_heads=1,
        head_dim=16,
        vocab_tokens=VOCAB_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        eos_token_ids=(EOS_TOKEN,),
        bos_token_id=BOS_TOKEN,
        window_tokens=window_tokens,
        embedding_dim=EMBEDDING_DIM,
    )


class HashEngine:
    """Implements `StepEngine` over a layout of bytes. The same tokens and sampling always give the same text."""

    def __init__(
        self,
        layout: KVLayout,
        memory: memoryview,
        vocab_tokens: int = VOCAB_TOKENS,
        window_tokens: int | None = None,
        seed: str = "",
    ) -> None:
        """`memory` is the whole arena. Bytes after its last whole block are not used.

        `window_tokens`: the next token is a hash of the KV of this many last tokens. None: of all tokens. `seed`: of
        the model's card.
        """
        assert layout.dtype == "uint8", f"the hash engine writes bytes, the layout has {layout.dtype}"
        assert vocab_tokens > TEXT_TOKENS[-1], f"{vocab_tokens} tokens cannot spell printable text"
        self.layout = layout
        self.progress = Progress()
        self._width = layout.kv_heads * layout.head_dim
        self._planes = layout.planes * layout.layers
        self._window_tokens = window_tokens
        self._seed = seed
        whole = np.frombuffer(memory, dtype=np.uint8)
        arena = whole[: len(whole) // layout.block_bytes * layout.block_bytes].reshape(-1, layout.block_bytes)
        self._shards = [(shard, _view(arena, shard, layout)) for shard in layout.shards]
        self._spill: np.ndarray | None = None

    def use_spill(self, memory: memoryview) -> None:
        """Read spilled blocks of one rank from this memory: [layers, slots, ...], as `SpillMemory` has it."""
        self._spill = np.frombuffer(memory, dtype=np.uint8).reshape(self.layout.layers, -1, *self.layout.shape[1:])

    def warm_up(self) -> None:
        """Do nothing: the engine has no kernels and no weights."""

    def execute(self, step: Step) -> StepResult:
        """Write the KV of every slice's tokens, then hash the context of the slices that sample."""
        self.compute_layers(step, self.layout.layers)
        self.progress.layers = self.layout.layers
        return StepResult(tuple(self._result(part) for part in step.slices))

    def compute_layers(self, step: Step, end: int) -> None:
        """Write the KV of the step's tokens for the layers before `end`, like a real engine in the middle of a step."""
        for part in step.slices:
            for position in range(part.start, part.start + part.count):
                self._write(part, position, end)

    def _write(self, part: Slice, position: int, end: int) -> None:
        block, slot = divmod(position, self.layout.block_tokens)
        kv = self._token_kv(part.tokens[position], position)
        for shard, blocks in self._shards:
            layers = min(end, shard.layers.stop) - shard.layers.start
            if layers > 0 and slot in shard.tokens:
                mine = kv[shard.layers.start :, :, shard.heads.start : shard.heads.stop]
                blocks[part.block_table[block], :layers, :, slot - shard.tokens.start] = mine[:layers]

    def _token_kv(self, token: int, position: int) -> np.ndarray:
        """Return the KV of a token at a position: [layers, planes, kv_heads, head_dim], for any layout of blocks."""
        layout = self.layout
        digest = shake_128(f"{self._seed}{position}:{token}".encode()).digest(self._planes * self._width)
        shape = (layout.layers, layout.planes, layout.kv_heads, layout.head_dim)
        return np.frombuffer(digest, dtype=np.uint8).reshape(shape)

    def _result(self, part: Slice) -> SliceResult:
        prompt_logprobs = _prompt_logprobs(part) if part.sampling.prompt_logprobs else ()
        if not part.sample:
            return SliceResult(prompt_logprobs=prompt_logprobs)
        if part.allowed is not None and not part.allowed.rows():
            return SliceResult(prompt_logprobs=prompt_logprobs)
        (token, logprob), *further = self._drawn(part)
        embedding = _unit_vector(self._context_digest(part.at(0))) if part.sampling.embedding else b""
        return SliceResult(
            token=token,
            logprob=logprob,
            prompt_logprobs=prompt_logprobs,
            embedding=embedding,
            further=tuple(further),
        )

    def _drawn(self, part: Slice) -> list[tuple[int, TokenLogprob | None]]:
        """Sample the next token, and one more for each accepted draft."""
        drawn: list[tuple[int, TokenLogprob | None]] = []
        wanted = part.sampling.top_logprobs
        for draft in range(part.drafts + 1):
            view = part.at(draft)
            digest = self._context_digest(view)
            token = _draw(digest, view)
            drawn.append((token, None if wanted is None else _made_up_logprob(token, digest, wanted)))
            if draft == part.drafts or part.tokens[view.start + view.count] != token:
                break
        return drawn

    def _context_digest(self, part: Slice) -> bytes:
        """Return a hash of the KV of all visible tokens, independent of block size and ranks.

        If ranks hold different copies of the same head, the hash differs, and so does the text.
        """
        layout, total = self.layout, part.start + part.count
        seen = total if self._window_tokens is None else min(total, self._window_tokens)
        first_block, skipped = divmod(total - seen, layout.block_tokens)
        table = np.asarray(part.block_table[first_block : -(-total // layout.block_tokens)])
        digest = blake2b(digest_size=16)
        if len(self._shards) == 1:  # one rank: hash the gathered bytes without another copy
            digest.update(np.ascontiguousarray(_seen(self._blocks(table), skipped, seen)).data)
            return digest.digest()
        kv = np.zeros((len(table), *layout.shape), np.uint8)
        held = np.zeros((layout.layers, layout.block_tokens, layout.kv_heads), np.bool_)
        slots = np.arange(len(table) * layout.block_tokens).reshape(len(table), 1, 1, -1, 1, 1)
        visible = (slots >= skipped) & (slots < skipped + seen)
        for shard, blocks in self._shards:
            layers, tokens, heads = (slice(part.start, part.stop) for part in (shard.layers, shard.tokens, shard.heads))
            mine = blocks[table] * visible[:, :, :, tokens]
            if not held[layers, tokens, heads].any():
                kv[:, layers, :, tokens, heads] = mine
                held[layers, tokens, heads] = True
            elif not np.array_equal(kv[:, layers, :, tokens, heads], mine):
                digest.update(np.ascontiguousarray(mine).data)
        digest.update(np.ascontiguousarray(_seen(kv, skipped, seen)).data)
        return digest.digest()

    def _blocks(self, table: np.ndarray) -> np.ndarray:
        """Return the blocks of a table of one rank: [blocks, layers, planes, block_tokens, kv_heads, head_dim]."""
        blocks, spilled = self._shards[0][1], int(np.count_nonzero(table >= SPILLED_FROM))
        if self._spill is None or not spilled:
            return blocks[table]
        return np.concatenate((self._spill[:, table[:spilled] - SPILLED_FROM].swapaxes(0, 1), blocks[table[spilled:]]))


def _seen(blocks: np.ndarray, skipped: int, seen: int) -> np.ndarray:
    """Return the KV of the visible tokens of consecutive blocks: [layers, planes, seen, kv_heads, head_dim]."""
    kv = blocks.transpose(1, 2, 0, 3, 4, 5)  # [layers, planes, blocks, block_tokens, kv_heads, head_dim]
    return kv.reshape(*kv.shape[:2], -1, *kv.shape[4:])[:, :, skipped : skipped + seen]


def _view(arena: np.ndarray, shard: Shard, layout: KVLayout) -> np.ndarray:
    """Return one rank's part of every block: [blocks, layers, planes, block_tokens, kv_heads, head_dim]."""
    shape = (len(shard.layers), layout.planes, len(shard.tokens), len(shard.heads), layout.head_dim)
    return arena[:, shard.offset_bytes : shard.offset_bytes + shard.size_bytes].reshape(len(arena), *shape)


def _unit_vector(context: bytes) -> bytes:
    """Return an artificial embedding of a context: little-endian float32 of unit length."""
    values = np.frombuffer(shake_128(context).digest(2 * EMBEDDING_DIM), dtype="<i2").astype(np.float64)
    return (values / np.linalg.norm(values)).astype("<f4").tobytes()


def _draw(context: bytes, part: Slice) -> int:
    """Return the next token: a function of the context if greedy, of context, seed and temperature if sampled."""
    sampling = part.sampling
    seed = f"{sampling.seed}:{sampling.temperature}" if sampling.temperature > 0 else "greedy"
    number = int.from_bytes(blake2b(context + seed.encode(), digest_size=8).digest(), "little")
    output_tokens = part.start + part.count - part.prompt_tokens
    banned = sampling.stop_token_ids if output_tokens < sampling.output_tokens_min else ()
    banned = (*banned, *part.bad_tokens())
    ends, number = number % EOS_ONE_IN == 0, number // EOS_ONE_IN
    if part.allowed is not None:
        return _draw_allowed(part.allowed.rows()[0], number, ends=ends, banned=banned)
    if ends and EOS_TOKEN not in banned:
        return EOS_TOKEN
    allowed = [token for token in TEXT_TOKENS if token not in banned]
    return allowed[number % len(allowed)] if allowed else BOS_TOKEN


def _draw_allowed(row: bytes, number: int, *, ends: bool, banned: Sequence[int]) -> int:
    """Return a token that the grammar allows: printable text if possible, else the end of the text."""
    allowed = [token for token in range(VOCAB_TOKENS) if row[token // 8] >> token % 8 & 1]
    text = [token for token in allowed if token in TEXT_TOKENS and token not in banned]
    if EOS_TOKEN in allowed and (not text or (ends and EOS_TOKEN not in banned)):
        return EOS_TOKEN
    choices = text or allowed
    return choices[number % len(choices)]


def _made_up_logprob(token: int, digest: bytes, count: int) -> TokenLogprob:
    """Return an artificial distribution: the token has probability 1/2, the others 1/4, 1/8 and so on."""
    first = token + digest[0] % 7
    others = [BYTE_TOKENS_FROM + (first + step) % 256 for step in range(1, count + 1)]
    ranked = [token, *(other for other in others if other != token)][:count]
    top = tuple((candidate, -math.log(2.0) * (rank + 1)) for rank, candidate in enumerate(ranked))
    return TokenLogprob(token=token, logprob=-math.log(2.0), top=top)


def _prompt_logprobs(part: Slice) -> tuple[TokenLogprob, ...]:
    end = min(part.start + part.count, part.prompt_tokens - 1)
    positions = range(part.start + 1, end + 1)
    return tuple(_prompt_logprob(part.tokens, position, part.sampling) for position in positions)


def _prompt_logprob(tokens: Sequence[int], position: int, sampling: Sampling) -> TokenLogprob:
    digest = blake2b(f"{position}:{tokens[position - 1]}:{tokens[position]}".encode(), digest_size=8).digest()
    return _made_up_logprob(tokens[position], digest, sampling.top_logprobs or 0)
