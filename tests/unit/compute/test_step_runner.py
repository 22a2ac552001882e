"""Decode steps replayed from fixed tensors equal steps run operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch.fx.experimental.proxy_tensor import make_fx

from baton.compute import decode_sizes
from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.compute.torch import step_runner
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.attention_backend import AttentionPlan
from baton.compute.torch.kernels.paged_decode import DecodeKernel, DecodeTables
from baton.compute.torch.kernels.paged_kv import BlockTables, PagedKV
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.step_runner import EagerRunner, GraphCapture, GraphRunner, NoCapture, Replay
from baton.core.types import BlockId
from baton.decide.kv.layout import KVLayout
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.unit.compute.models import part_of, poison, run, tiny_model
from tests.unit.compute.reference_kernels import PaddedOps, TorchDecodeKernel, TorchRowProduct

BLOCKS, BLOCK_TOKENS = 80, 4
CPU = torch.device("cpu")


class TracedCapture:
    """Records and repeats the operations of one run, as a CUDA graph does, on a CPU."""

    def capture(self, compute: Replay) -> Replay:
        return torch.inference_mode()(make_fx(compute)())


class CountingCapture:
    """Counts captures."""

    def __init__(self) -> None:
        self.count = 0

    def capture(self, compute: Replay) -> Replay:
        self.count += 1
        compute()
        return compute


def _engine(
    model_path: Path,
    capture: GraphCapture | None,
    kernel: DecodeKernel | None = None,
    context_tokens: int = 128,
    requests_max: int = 128,
) -> tuple[TorchEngine, bytearray]:
    card = resolve_model(str(model_path))
    layout, (config, weights) = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32"), open_model(card)
    arena = bytearray(layout.block_bytes * BLOCKS)
    poison(arena)
    kv = PagedKV(memoryview(arena), layout)
    with torch.inference_mode():
        loader = TensorLoader(weights, torch.float32, CPU)
        if capture is not None:
            loader = TensorLoader(weights, torch.float32, CPU, TorchRowProduct(), PaddedOps())
        model = Decoder(config, loader)
    eager = EagerRunner(model, SdpaBackend(), CPU)
    kernel = kernel or TorchDecodeKernel()
    runner = eager if capture is None else GraphRunner(eager, kv, kernel, capture, context_tokens, requests_max)
    return TorchEngine(model, kv, runner, CPU), arena


def _decode_together(engine: StepEngine, counts: Sequence[int]) -> list[list[int]]:
    """Prefill one request after the other, then decode all of them, the shortest ending first."""
    tables = [range(20 * index, 20 * index + 20) for index in range(len(counts))]
    texts = [list(TOKENS[index : index + 9 + 3 * index]) for index in range(len(counts))]
    for text, table in zip(texts, tables, strict=True):
        text.append(run(engine, part_of(text, table))[0].token)
    for turn in range(max(counts)):
        live = [index for index, count in enumerate(counts) if count > turn]
        parts = [part_of(texts[index], tables[index], start=len(texts[index]) - 1) for index in live]
        for index, result in zip(live, run(engine, *parts), strict=True):
            texts[index].append(result.token)
    return texts


NAMES = ("llama_tied", "mistral_window", "qwen3_biased_tied", "qwen2moe", "deepseek3")
COUNTS = (12, 6, 3)
"""Tokens to decode of three requests: batches of 3, 2 and 1 in graphs for 4, 2 and 1, beyond the first width."""
FEW_COUNTS = (3, 3, 3)
"""The same without the smaller graphs. A trace of a model with latents and experts takes 2 s for each graph."""
TRACED = {"llama_tied": COUNTS, "deepseek3": FEW_COUNTS}
"""Models that are traced in every run: keys and values per head, and latents with experts."""


@pytest.mark.parametrize(
    ("name", "capture", "counts"),
    [
        *((name, NoCapture(), COUNTS) for name in NAMES),
        *((name, TracedCapture(), counts) for name, counts in TRACED.items()),
        *(pytest.param(name, TracedCapture(), COUNTS, marks=pytest.mark.deep) for name in NAMES[1:]),
    ],
)
def test_replayed_steps_equal_eager_steps(
    name: str, capture: GraphCapture, counts: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other blocks do not change."""
    monkeypatch.setattr(decode_sizes, "WIDTH_TOKENS_MIN", 16)
    tiny_model(CONFIGS[name]).save_pretrained(tmp_path)
    replayed, arena = _engine(tmp_path, capture)
    eager, expected = _engine(tmp_path, None)
    assert _decode_together(replayed, counts) == _decode_together(eager, counts)
    free = replayed.layout.block_bytes * 20 * len(counts)
    assert arena[free:] == expected[free:] == b"\xff" * (len(arena) - free)


def test_steps_without_a_graph_run_eagerly(tmp_path: Path) -> None:
    """Chunks, and batches beyond the largest bucket."""
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    engine, _ = _engine(tmp_path, NoCapture())
    count = decode_sizes.BATCH_BUCKETS[-1] + 1
    run(engine, part_of(TOKENS[:8], range(2)))
    parts = [part_of(TOKENS[:9], [0, 1, 2], start=8) for _ in range(count)]
    assert len({result.token for result in run(engine, *parts)}) == 1


def test_all_graphs_are_captured_before_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captures write nothing to the arena, and no step needs a further one."""
    monkeypatch.setattr(decode_sizes, "WIDTH_TOKENS_MIN", 16)
    monkeypatch.setattr(step_runner, "BATCH_BUCKETS", (1, 2, 4))
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    capture = CountingCapture()
    engine, arena = _engine(tmp_path, capture)
    engine.warm_up()
    assert arena == b"\xff" * len(arena)
    captured = capture.count
    assert captured >= 2 * 3
    _decode_together(engine, COUNTS)
    assert capture.count == captured


def test_graphs_beyond_the_limits_of_a_server_are_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a worker is reserved for its own context and batch, not for those that the model allows."""
    monkeypatch.setattr(decode_sizes, "WIDTH_TOKENS_MIN", 16)
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    capture = CountingCapture()
    engine, _ = _engine(tmp_path, capture, context_tokens=48, requests_max=3)
    engine.warm_up()
    assert capture.count == 2 * 3, "contexts of 16 and 48 tokens, batches of 1, 2 and 4"
    run(engine, part_of(TOKENS[:8], range(2)))
    run(engine, *(part_of(TOKENS[:9], [0, 1, 2], start=8) for _ in range(5)))
    assert capture.count == 2 * 3, "a batch of 5 runs without a graph"


def test_inputs_of_all_graphs_begin_at_multiples_of_16_bytes(tmp_path: Path) -> None:
    """Triton compiles a kernel for aligned pointers, and again for others."""
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    addresses: list[int] = []

    class Watched(TorchDecodeKernel):
        def plan(self, tables: DecodeTables, kv: PagedKV) -> AttentionPlan:
            addresses.extend((tables.blocks.data_ptr(), tables.lengths.data_ptr()))
            return super().plan(tables, kv)

    engine, _ = _engine(tmp_path, CountingCapture(), Watched(), context_tokens=16)
    engine.warm_up()
    assert len(addresses) == 2 * len(decode_sizes.BATCH_BUCKETS)
    assert [address % 16 for address in addresses] == [0] * len(addresses)


def test_all_captures_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream that it has seen."""
    made: list[object] = []
    captured_on: list[object] = []

    class Stream:
        def __init__(self) -> None:
            made.append(self)

        def wait_stream(self, _: object) -> None:
            pass

    def graph(_: object, *, pool: object, stream: object = None) -> nullcontext[None]:
        captured_on.append(stream)
        return nullcontext()

    current = Stream()
    made.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = step_runner.CudaCapture()
    for _ in range(3):
        capture.capture(lambda: (torch.zeros(1), torch.zeros(1)))
    assert captured_on == made * 3
    assert len(made) == 1


def test_padding_attends_to_nothing(tmp_path: Path) -> None:
    """A graph for 4 requests reads no key for the place of the fourth one."""
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    lengths: list[list[int]] = []

    class Watched(TorchDecodeKernel):
        def plan(self, tables: DecodeTables, kv: PagedKV) -> AttentionPlan:
            lengths.append(tables.lengths.tolist())
            return super().plan(tables, kv)

    engine, _ = _engine(tmp_path, NoCapture(), Watched())
    for index in range(3):
        run(engine, part_of(TOKENS[:8], [2 * index, 2 * index + 1]))
    run(engine, *(part_of(TOKENS[:8], [2 * index, 2 * index + 1], start=7) for index in range(3)))
    assert lengths == [[8, 8, 8, 0]]


def test_tables_are_converted_again_only_after_a_grant() -> None:
    """The same tuple is the same table. A list may have changed in place."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=BLOCK_TOKENS, dtype="float32")
    tables, granted = BlockTables(), (BlockId(3), BlockId(5))

    def blocks(table: Sequence[BlockId], start: int) -> torch.Tensor:
        part = structs.replace(part_of([0] * (start + 1), [0], start=start), block_table=table)
        return tables.rows([part], layout)[0].blocks

    first = blocks(granted, 2)
    assert blocks(granted, 3) is first
    assert blocks(granted, 4).tolist() == [3, 5]
    assert blocks((BlockId(3), BlockId(6)), 5).tolist() == [3, 6]
    changing = [BlockId(1), BlockId(2)]
    assert blocks(changing, 6).tolist() == [1, 2]
    changing[1] = BlockId(7)
    assert blocks(changing, 6).tolist() == [1, 7]
