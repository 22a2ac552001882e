"""A model over several ranks computes what one rank computes.

Tolerance: 2e-4 absolute on log probabilities in float32, as beside transformers. Partial sums are added in another
order, nothing else differs; so greedy text is the same wherever no two tokens are that close.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.distributed import HashStore, is_nccl_available

from baton.compute.load_engine import choose_engine
from baton.compute.models.resolve import resolve_model
from baton.compute.ranks.commands import RankCommand
from baton.compute.ranks.load_rank import RankArena, leader_engine, load_rank
from baton.compute.ranks.place import RankPlace, rank_problems
from baton.compute.ranks.process_groups import connect_ranks
from baton.compute.step_engine import StepEngine
from baton.compute.torch.kernels.paged_kv import BlockPart
from baton.compute.torch.layers.collectives import SingleRank
from baton.core.errors import ModelError
from baton.core.types import BlockId, Sampling
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.layout import KVLayout
from baton.move.transport.convert import convert
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.unit.compute.models import TINY, VOCAB, all_logprobs, engine_of, generate, part_of, poison, run, tiny_model
from tests.unit.compute.rank_threads import engine_over, parallel_engine

TOLERANCE = 2e-4
EIGHT_HEADS = transformers.LlamaConfig(**TINY | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8})
NINE_HEADS = transformers.LlamaConfig(
    **TINY | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
)
NAMES = {
    "llama_tied": (2, 1),
    "llama_untied": (2, 2),
    "llama_biases": (2, 3),
    "llama_one_kv_head": (4, 1),
    "qwen3": (2, 1),
    "qwen2_window_in_upper_layers": (1, 3),
    "mistral_window": (2, 2),
    "mixtral": (2, 1),
    "qwen2moe_normalized_some_dense_unbiased": (2, 2),
    "qwen3moe_normalized_every_second": (1, 2),
    "deepseek2_lite": (4, 1),
    "deepseek3": (2, 3),
}
"""Every kind of attention and of MLP, over (tensor, pipeline) ranks."""


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_gives_the_log_probabilities_of_one_rank(name: str, tmp_path: Path) -> None:
    tiny_model(CONFIGS[name]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    expected = all_logprobs(engine_of(card, kind="torch")[0], TOKENS, range(18), VOCAB)
    tensor, pipeline = NAMES[name]
    with parallel_engine(card, tensor=tensor, pipeline=pipeline) as (engine, arena, _):
        poison(arena)
        np.testing.assert_allclose(all_logprobs(engine, TOKENS, range(18), VOCAB), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        (2, 1),
        (3, 1),
        (8, 1),
        (2, 2),
        *(pytest.param(*ranks, marks=pytest.mark.deep) for ranks in ((4, 1), (1, 2), (1, 3), (4, 3))),
    ],
)
def test_chunks_and_other_requests_do_not_change_results_of_ranks(tensor: int, pipeline: int, tmp_path: Path) -> None:
    """8 heads on 4 KV heads: divided, duplicated, and in stages. 9 on 3, as in the embedded model: in three parts.

    Prompts in chunks with decoding requests.
    """
    tiny_model(NINE_HEADS if tensor == 3 else EIGHT_HEADS).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone = engine_of(card, kind="torch")[0]
    sampled = Sampling(temperature=0.8, top_p=0.9, seed=5)
    texts = [generate(alone, TOKENS[:11], range(16), 9), generate(alone, TOKENS[:30], range(16), 9, sampled)]
    with parallel_engine(card, tensor=tensor, pipeline=pipeline) as (engine, arena, _):
        poison(arena)
        engine.warm_up()
        assert arena == b"\xff" * len(arena), "warming up wrote into the arena"
        first, second = [*TOKENS[:11]], [*TOKENS[:30]]
        run(engine, part_of(second, range(20, 36), end=13))
        first.append(run(engine, part_of(first, range(16)))[0].token or 0)
        for _ in range(8):
            one = part_of(first, range(16), start=len(first) - 1, prompt_tokens=11)
            # the other prompt goes on beside the decoding request, its last chunk a token at a time
            run(engine, one, part_of(second, range(20, 36), start=13, end=26))
            first.append(run(engine, one)[0].token or 0)
        assert first[11:] == texts[0]
        assert generate(engine, TOKENS[:30], range(40, 56), 9, sampled) == texts[1]


@pytest.mark.deep
@pytest.mark.parametrize(("tensor", "pipeline", "context"), [(3, 1, 1), (1, 2, 1), (9, 1, 1), (9, 1, 3)])
def test_the_embedded_model_gives_the_text_of_one_rank(tensor: int, pipeline: int, context: int) -> None:
    """SmolLM2 has 9 query heads on 3 KV heads. Three ranks divide them; of nine, three hold or share a KV head."""
    card = resolve_model("smollm2-135m")
    prompt = [504, 2367, 282, 260, 1718, 6413, 314, 9681, 411, 253, 1123, 28, 2028, 2]
    count = 4
    alone = engine_of(card, kind="torch", block_tokens=12)[0]
    expected = generate(alone, prompt, range(4), count)
    wanted = Sampling(temperature=0.0, top_logprobs=20, prompt_logprobs=True)
    logprobs = [_top(run(alone, part_of(prompt, range(4), sampling=wanted))[0])]
    with parallel_engine(card, tensor=tensor, pipeline=pipeline, context=context, block_tokens=12) as (engine, _, _):
        assert generate(engine, prompt, range(4), count) == expected
        logprobs.append(_top(run(engine, part_of(prompt, range(4), sampling=wanted))[0]))
    assert np.abs(logprobs[0] - logprobs[1]).max() < TOLERANCE


def _top(result) -> np.ndarray:
    """Return the log probabilities of each prompt token, and of the best twenty."""
    return np.array([[entry.logprob, *sorted(logprob for _, logprob in entry.top)] for entry in result.prompt_logprobs])


def test_an_arena_holds_only_what_its_ranks_wrote(tmp_path: Path) -> None:
    """Every rank's part equals the same heads and layers of a single rank's block. No byte is left unwritten."""
    tiny_model(EIGHT_HEADS).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    engine, whole = engine_of(card, kind="torch")
    run(engine, part_of(TOKENS[:16], range(4)))
    one = np.frombuffer(whole, np.float32)[: 4 * engine.layout.block_bytes // 4].reshape(4, *engine.layout.shape)
    for tensor, pipeline in ((2, 1), (8, 1), (2, 2), (1, 3)):
        with parallel_engine(card, tensor=tensor, pipeline=pipeline) as (ranks, arena, layout):
            poison(arena)
            run(ranks, part_of(TOKENS[:16], range(4)))
            blocks = np.frombuffer(arena, np.uint8).reshape(-1, layout.block_bytes)
            assert (blocks[4:] == 255).all()
            for shard in layout.shards:
                bytes_ = blocks[:4, shard.offset_bytes : shard.offset_bytes + shard.size_bytes]
                shape = (4, len(shard.layers), 2, layout.block_tokens, len(shard.heads), layout.head_dim)
                mine = np.ascontiguousarray(bytes_).view(np.float32).reshape(shape)
                expected = one[:, shard.layers.start : shard.layers.stop, :, :, shard.heads.start : shard.heads.stop]
                np.testing.assert_allclose(mine, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), pytest.param(8, 1, marks=pytest.mark.deep), (1, 3)])
def test_converted_kv_gives_the_same_text(tensor: int, pipeline: int, tmp_path: Path) -> None:
    """Prefill on several ranks, decode on one in another arena with other blocks, and vice versa."""
    tiny_model(EIGHT_HEADS).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    engine, whole = engine_of(card, kind="torch", block_tokens=8)
    expected = generate(engine, TOKENS[:43], range(16), 20)
    tables = [BlockId(block) for block in range(13, 29)], [BlockId(block) for block in range(60, 20, -1)]
    with parallel_engine(card, tensor=tensor, pipeline=pipeline) as (ranks, arena, layout):
        first = run(ranks, part_of(TOKENS[:43], tables[1]))[0].token
        poison(whole)
        bring(layout, engine.layout, tables[::-1], arena, whole)
        assert [first, *continue_text(engine, tables[0], first, 19)] == expected
        poison(arena)
        poison(whole)
        first = run(engine, part_of(TOKENS[:43], tables[0]))[0].token
        bring(engine.layout, layout, tables, whole, arena)
        assert [first, *continue_text(ranks, tables[1], first, 19)] == expected


def bring(
    source: KVLayout, target: KVLayout, tables: Sequence[list[BlockId]], ours: bytearray, theirs: bytearray
) -> None:
    """Convert the KV of the 43 tokens of a prompt from one arena into another."""
    conversion = Conversion(source, target)
    assert not conversion.loss
    convert(conversion.plan(tables[0], tables[1], range(43)), memoryview(ours), memoryview(theirs))


def continue_text(engine: StepEngine, table: Sequence[BlockId], first: int | None, count: int) -> list[int]:
    """Decode after the 43 tokens of a prompt, which are already computed."""
    tokens = [*TOKENS[:43], first or 0]
    for _ in range(count):
        part = part_of(tokens, table, start=len(tokens) - 1, prompt_tokens=43)
        tokens.append(run(engine, part)[0].token or 0)
    return tokens[44:]


def test_native_options_are_refused_before_ranks_start(tmp_path: Path) -> None:
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=4, dtype="int8", tensor_parallel=2, pipeline_parallel=1)
    kv, weights = rank_problems(card, layout, "stored")
    assert kv.startswith("KV in int8 needs the native engine")
    assert weights.startswith("--weights stored needs the native engine")
    alone = card.layout(block_tokens=4, dtype="int8", tensor_parallel=1, pipeline_parallel=1)
    assert rank_problems(card, alone, "stored") == []


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (3, 1, "2 KV heads cannot be shared by 3 ranks"),
        (8, 1, "4 query heads cannot be shared by 8 ranks"),
        (1, 4, "3 layers cannot be shared by 4 pipeline stages"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused_with_numbers(
    tensor: int, pipeline: int, message: str, tmp_path: Path
) -> None:
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=4, dtype="float32", tensor_parallel=tensor, pipeline_parallel=pipeline)
    assert any(message in refusal for refusal in rank_problems(card, layout))
    ranks = SingleRank()
    with pytest.raises(ModelError, match=message):
        load_rank(
            card,
            layout,
            RankArena(memoryview(bytearray(9)), BlockPart(0, 9, range(4), 4)),
            ranks,
            dtype="float32",
            threads=1,
        )


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(8, 1, marks=pytest.mark.deep), (2, 3)])
def test_ranks_with_an_arena_each_keep_their_parts_of_every_block(tensor: int, pipeline: int, tmp_path: Path) -> None:
    """As on GPUs. The text is the same, and the concatenated parts of a block equal the block of a shared arena."""
    tiny_model(EIGHT_HEADS).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    with parallel_engine(card, tensor=tensor, pipeline=pipeline, blocks=16) as (engine, arena, layout):
        expected = generate(engine, TOKENS[:20], range(3, 16), 9)
    own = [memoryview(bytearray(16 * shard.size_bytes)) for shard in layout.shards]
    with engine_over(card, layout, lambda place: RankArena.alone(own[place.rank], layout, place)) as engine:
        assert generate(engine, TOKENS[:20], range(3, 16), 9) == expected
    parts = [np.frombuffer(each, np.uint8).reshape(16, -1) for each in own]
    joined, shared = np.concatenate(parts, 1), np.frombuffer(arena, np.uint8).reshape(16, -1)
    np.testing.assert_allclose(joined.view(np.float32), shared.view(np.float32), atol=TOLERANCE, rtol=0)
    assert joined[3:].any()
    assert not joined[:3].any()


def test_ranks_on_gpus_need_a_torch_with_nccl() -> None:
    if is_nccl_available():
        pytest.skip("this PyTorch has NCCL")
    with pytest.raises(ModelError, match=r"NCCL, which torch .* was built without; install .* or use --device cpu"):
        connect_ranks(RankPlace(rank=0, tensor=2, pipeline=1), HashStore(), torch.device("cuda:0"))


def test_ranks_use_the_torch_engine_with_a_reason(tmp_path: Path) -> None:
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    choice = choose_engine(card, card.layout(block_tokens=4, dtype="float32", tensor_parallel=2))
    assert (
        str(choice)
        == "torch engine (the native engine computes whole models, and this worker has 2 ranks), sdpa attention"
    )


class _Gone:
    """Implements `RankCommandChannel`: the other ranks have closed their sockets."""

    def send(self, command: RankCommand) -> None:
        raise BrokenPipeError("the other side is closed")


def test_a_worker_whose_ranks_are_out_of_step_ends(tmp_path: Path) -> None:
    """It must not retry its requests one by one, because the other ranks may still wait in the failed step."""
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=4, dtype="float32")
    arena = RankArena.of(memoryview(bytearray(layout.block_bytes * 8)), layout, SingleRank.place)
    parts = load_rank(card, layout, arena, SingleRank(), dtype="float32", threads=1)
    with pytest.raises(SystemExit, match="out of step, the worker ends: BrokenPipeError"):
        run(leader_engine(parts, layout, _Gone()), part_of(TOKENS[:5], range(2)))
