"""A request's logits and KV have the same bits whatever else is in the batch, however its prefill was cut, on any
number of threads, in blocks of any size and order, and whether its prefix was computed or found.

Every test plays random schedules of forced tokens and compares bytes with the same requests alone, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import library_path
from baton.compute.native.engine import NativeEngine
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load_native import Computation, load_native_engine
from baton.core.config import WeightsChoice
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling
from baton.decide.kv.layout import KVDtype
from tests.numerics.test_architectures import LATENT
from tests.unit.compute.models import TINY, VOCAB, tiny_model

KERNELS = NativeLibrary(library_path()).usable_kernels()
LENGTHS = (1, 2, 63, 64, 65, 130, 256, 257, 514)
"""Lengths around the borders of attention's tiles (64 keys) and splits (256)."""
SEEN = Sampling(temperature=0.0, top_logprobs=VOCAB)
CONFIGS = {
    "grouped": transformers.LlamaConfig(**TINY | {"max_position_embeddings": 1024, "head_dim": 32}),
    "odd_sizes_and_window": transformers.MistralConfig(
        **TINY | {"max_position_embeddings": 1024, "head_dim": 24, "intermediate_size": 72}, sliding_window=100
    ),
    "experts": transformers.MixtralConfig(
        **TINY | {"max_position_embeddings": 1024, "intermediate_size": 40}, num_local_experts=5, num_experts_per_tok=2
    ),
    "experts_beside_a_shared_and_a_dense_one": transformers.Qwen2MoeConfig(
        **TINY | {"max_position_embeddings": 1024},
        num_experts=40,
        num_experts_per_tok=4,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        mlp_only_layers=[1],
    ),
    "latents_and_experts_of_groups": transformers.DeepseekV3Config(
        **LATENT | {"max_position_embeddings": 1024, "n_routed_experts": 12, "num_experts_per_tok": 4},
        q_lora_rank=20,
        n_group=3,
        topk_group=2,
    ),
    "latents_of_many_heads": transformers.DeepseekV2Config(
        **LATENT
        | {"max_position_embeddings": 1024, "kv_lora_rank": 40, "num_attention_heads": 16, "num_key_value_heads": 16},
        q_lora_rank=None,
    ),
}


@dataclass
class Request:
    """A request with fixed tokens, its blocks, the results at each position, and its progress."""

    tokens: list[int]
    table: list[int]
    done: int = 0


@dataclass
class Run:
    """One engine with its arena, and its results."""

    engine: NativeEngine
    arena: np.ndarray

    def step(self, requests: Sequence[Request], counts: Sequence[int]) -> list[bytes]:
        """Compute the next tokens of requests, and return the log probabilities after the last of each, as bytes."""
        parts = tuple(
            Slice(
                request_id=RequestId("r"),
                tokens=request.tokens,
                start=request.done,
                count=count,
                block_table=[BlockId(block) for block in request.table],
                sample=True,
                sampling=SEEN,
                prompt_tokens=len(request.tokens),
            )
            for request, count in zip(requests, counts, strict=True)
        )
        for request, count in zip(requests, counts, strict=True):
            request.done += count
        results = self.engine.execute(Step(parts)).slices
        return [np.array(sorted(part.logprob.top)).tobytes() for part in results if part.logprob is not None]

    def kv(self, request: Request) -> bytes:
        """Return the KV of all tokens in order, independent of block size and block ids."""
        layout = self.engine.layout
        planes = (layout.layers, layout.planes)
        row_bytes = layout.token_bytes // layout.layers // layout.planes
        blocks = self.arena.reshape(-1, *planes, layout.block_tokens, row_bytes)
        rows = blocks[request.table].transpose(1, 2, 0, 3, 4).reshape(*planes, -1, row_bytes)
        return rows[:, :, : request.done].tobytes()


def _run(card: ModelCard, kernels: str, dtype: Dtype, *, threads: int, block_tokens: int, blocks: int) -> Run:
    kv_dtype: KVDtype = dtype
    layout = card.layout(block_tokens=block_tokens, dtype=kv_dtype)
    arena = bytearray(b"\xff" * (layout.block_bytes * blocks))
    library = NativeLibrary(library_path(), kernels)
    engine = load_native_engine(card, layout, memoryview(arena), library, Computation(dtype=dtype, threads=threads))
    return Run(engine, np.frombuffer(arena, dtype=np.uint8))


def _alone(run: Run, tokens: Sequence[int]) -> tuple[list[bytes], bytes]:
    """Compute a request token by token, and return the results at each position and the KV."""
    request = Request(list(tokens), list(range(-(-len(tokens) // run.engine.layout.block_tokens))))
    return [run.step([request], [1])[0] for _ in tokens], run.kv(request)


def _tables(rng: random.Random, blocks: int, block_tokens: int, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    free = rng.sample(range(blocks), blocks)
    return [[free.pop() for _ in range(-(-len(prompt) // block_tokens))] for prompt in prompts]


EVERYWHERE = ("grouped", "latents_and_experts_of_groups")
"""Models that are computed with every instruction set in every run; the others with the fastest one only."""
CASES = [
    pytest.param(name, kernels, marks=() if kernels == KERNELS[0] or name in EVERYWHERE else pytest.mark.deep)
    for name in CONFIGS
    for kernels in KERNELS
]


@pytest.fixture(scope="module", params=CONFIGS)
def card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny_model(CONFIGS[request.param]).save_pretrained(folder)
    return resolve_model(str(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("card", "kernels"), CASES, indirect=["card"])
def test_bits_do_not_depend_on_batch_chunks_threads_or_blocks(card: ModelCard, kernels: str, dtype: Dtype) -> None:
    rng = random.Random(f"{kernels} {dtype}")
    lengths = LENGTHS if kernels != "PLAIN" else LENGTHS[:6]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    lonely = _run(card, kernels, dtype, threads=1, block_tokens=16, blocks=40)
    expected = [_alone(lonely, prompt) for prompt in prompts]
    for threads, block_tokens in ((1, 1), (2, 4), (3, 16), (2, 128)):
        blocks = sum(-(-len(prompt) // block_tokens) for prompt in prompts) + 3
        run = _run(card, kernels, dtype, threads=threads, block_tokens=block_tokens, blocks=blocks)
        tables = _tables(rng, blocks, block_tokens, prompts)
        requests = [Request(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
        while waiting := [index for index, request in enumerate(requests) if request.done < len(request.tokens)]:
            chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
            counts = [_chunk(rng, len(requests[index].tokens) - requests[index].done) for index in chosen]
            seen = run.step([requests[index] for index in chosen], counts)
            for index, bits in zip(chosen, seen, strict=True):
                assert bits == expected[index][0][requests[index].done - 1], (threads, block_tokens, index)
        for request, (_, kv) in zip(requests, expected, strict=True):
            assert run.kv(request) == kv


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("weights", "kv_dtype"), [("stored", "int8"), ("int8", "fp8")])
def test_bits_of_8_bit_weights_and_kv_depend_on_the_request_only(
    weights: WeightsChoice, kv_dtype: KVDtype, kernels: str, tmp_path: Path
) -> None:
    """Past a split of attention, in blocks of two sizes, and over a prefix computed by another engine."""
    tiny_model(CONFIGS["grouped"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))

    def run(threads: int, block_tokens: int) -> Run:
        layout = card.layout(block_tokens=block_tokens, dtype=kv_dtype)
        arena, library = bytearray(b"\xff" * layout.block_bytes * 640), NativeLibrary(library_path(), kernels)
        engine = load_native_engine(
            card, layout, memoryview(arena), library, Computation(weights=weights, threads=threads)
        )
        return Run(engine, np.frombuffer(arena, dtype=np.uint8))

    rng = random.Random(f"{kernels} {weights}")
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (65, 300)]
    lonely = run(1, 16)
    expected = [_alone(lonely, prompt) for prompt in prompts]
    for threads, block_tokens in ((2, 16), (3, 4)):
        company = run(threads, block_tokens)
        tables = _tables(rng, 640, block_tokens, prompts)
        requests = [Request(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
        while waiting := [index for index, request in enumerate(requests) if request.done < len(request.tokens)]:
            counts = [_chunk(rng, len(requests[index].tokens) - requests[index].done) for index in waiting]
            seen = company.step([requests[index] for index in waiting], counts)
            assert seen == [expected[index][0][requests[index].done - 1] for index in waiting], (threads, block_tokens)
        assert [company.kv(request) for request in requests] == [kv for _, kv in expected]
    other = run(2, 16)
    other.arena[:] = lonely.arena  # the longer prompt was computed last, from block 0 on
    for found in (16, 256, 288):
        request = Request(prompts[1], [*range(found // 16), *range(100, 119 - found // 16)], done=found)
        assert other.step([request], [300 - found]) == [expected[1][0][-1]]


def _chunk(rng: random.Random, left: int) -> int:
    """Return a chunk size: often 1, often all remaining tokens, else a random one."""
    return rng.choice((1, min(left, rng.randint(1, 40)), rng.randint(1, left), left))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_a_prefix_hit(card: ModelCard, dtype: Dtype) -> None:
    """Another engine with other threads continues over blocks of the first one."""
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB) for _ in range(330)]
    first = _run(card, KERNELS[0], dtype, threads=1, block_tokens=16, blocks=30)
    whole = Request(prompt, list(range(21)))
    expected = first.step([whole], [330])[0]
    second = _run(card, KERNELS[0], dtype, threads=2, block_tokens=16, blocks=50)
    second.arena[: len(first.arena)] = first.arena
    for found in (16, 256, 320):
        prefix = range(found // 16)
        request = Request(prompt, [*prefix, *range(30, 30 + 21 - len(prefix))], done=found)
        assert second.step([request], [330 - found])[0] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_overflow_does_not_affect_other_requests(name: str, dtype: Dtype, tmp_path: Path) -> None:
    """Token 0 gives NaN from the first layer on. A request without it has the same bits as alone."""
    model = tiny_model(CONFIGS[name])
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.inf
    model.save_pretrained(tmp_path)
    run = _run(resolve_model(str(tmp_path)), KERNELS[0], dtype, threads=2, block_tokens=16, blocks=20)
    healthy = Request([index % (VOCAB - 1) + 1 for index in range(30)], [0, 1])
    expected = run.step([healthy], [30])
    for ill in ([0] * 9, [*healthy.tokens[:20], 0, 5, 6]):
        requests = [Request(ill, [4, 5]), Request(healthy.tokens, [2, 3]), Request(ill, [6, 7])]
        seen = run.step(requests, [len(ill), 30, len(ill)])
        assert seen[1] == expected[0]
        assert run.step([Request(healthy.tokens, [0, 1])], [30]) == expected, "what it left behind is not read"
