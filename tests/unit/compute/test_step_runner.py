"""Decode steps replayed from fixed tensors equal steps run operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from baton.compute import decode_sizes
from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.paged_kv import PagedKV
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.step_runner import EagerRunner, GraphCapture, GraphRunner, NoCapture, Replay
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.unit.compute.models import part_of, poison, run, tiny_model
from tests.unit.compute.reference_kernels import TorchDecodeKernel, TorchRowProduct

BLOCKS, BLOCK_TOKENS = 80, 4
CPU = torch.device("cpu")


class TracedCapture:
    """Records and repeats the operations of one run, as a CUDA graph does, on a CPU."""

    def capture(self, compute: Replay) -> Replay:
        return torch.inference_mode()(make_fx(compute)())


def _engine(model_path: Path, capture: GraphCapture | None) -> tuple[TorchEngine, bytearray]:
    card = resolve_model(str(model_path))
    layout, (config, weights) = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32"), open_model(card)
    arena = bytearray(layout.block_bytes * BLOCKS)
    poison(arena)
    kv = PagedKV(memoryview(arena), layout)
    with torch.inference_mode():
        product = TorchRowProduct() if capture is not None else None
        model = Decoder(config, TensorLoader(weights, torch.float32, CPU, product))
    eager = EagerRunner(model, SdpaBackend(), CPU)
    runner = eager if capture is None else GraphRunner(eager, kv, TorchDecodeKernel(), capture)
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
