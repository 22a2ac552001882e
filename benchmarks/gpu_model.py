"""Measure whole steps of models on a GPU: decode at batch 1 to 128, prompts of 512 to 32,768 tokens.

python benchmarks/gpu_model.py [--seconds 200] [--rehearse]      (by `make gpu`, which sets PYTHONPATH)

The weights are random, in the shapes of examples/shapes. A step's time includes the host's part and the sampling.
`floor`: the share of the time that the measured copy and matmul rates allow for the bytes and the operations of a step.
`sdpa`: the same model with torch's attention, and without graphs.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from _gpu import Budget, Ceilings, arguments, ceilings, described, missing, random_kv

from baton.compute.decode_sizes import BATCH_BUCKETS
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.paged_kv import PagedKV
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.load_torch import triton_kernels
from baton.compute.torch.step_runner import CudaCapture, EagerRunner, GraphRunner, NoCapture
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling
from baton.decide.kv.layout import KVLayout
from tests.dummies import SHAPES, small

MODELS = ("llama-3.1-8b", "deepseek-v2-lite", "qwen3-30b-a3b")
"""The smallest first: each needs more time to load."""
LOAD_BYTES_PER_S = 5e8
"""An estimate of the rate at which random weights are made and copied to the device."""
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """The steps that are measured."""

    batches: tuple[int, ...]
    context_tokens: int
    prompts: tuple[int, ...]
    repeats: int

    @property
    def blocks(self) -> int:
        return max(self.batches[-1] * -(-self.context_tokens // BLOCK_TOKENS), -(-self.prompts[-1] // BLOCK_TOKENS))


WHOLE = Sizes((1, 8, 32, 64, 128), 1024, (512, 2048, 8192, 32768), 7)
REHEARSED = Sizes((1, 2), 24, (8, 40), 1)


@dataclass(frozen=True, slots=True)
class Work:
    """The least bytes and operations of a step of one model."""

    config: ModelConfig
    layout: KVLayout

    def weights(self, tokens: int) -> tuple[float, float]:
        """Return the weights that a step reads, and those that one token uses. Without the embedding table."""
        dense = routed = 0.0
        for name, shape in expected_shapes(self.config).items():
            if ".experts." in name:
                routed += math.prod(shape)
            elif name != "model.embed_tokens.weight" or self.config.tied_embeddings:
                dense += math.prod(shape)
        if self.config.experts is None:
            return dense, dense
        share = self.config.experts.per_token / self.config.experts.count
        return dense + routed * (1 - (1 - share) ** tokens), dense + routed * share

    def floor_s(self, limits: Ceilings, tokens: int, keys_read: int, pairs: int) -> float:
        """Return the least time. keys_read: tokens whose KV is read. pairs: of a query and a key."""
        read, used = self.weights(tokens)
        size_bytes = read * 2 + keys_read * self.layout.token_bytes
        attention = 4 * pairs * self.config.heads * self.config.head_dim * self.config.layers
        return limits.floor_s(size_bytes, 2 * used * tokens + attention)


def engines(folder: Path, blocks: int, device: torch.device) -> tuple[Work, dict[str, TorchEngine]]:
    """Load one model once, for the engine that serves and for one with torch's attention."""
    card = resolve_model(str(folder), "dummy")
    number = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies in float32 only
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32" if number == torch.float32 else "bfloat16")
    kv = PagedKV(torch.zeros(layout.block_bytes * blocks, dtype=torch.uint8, device=device), layout)
    random_kv(kv)
    config, weights = open_model(card)
    kernels = triton_kernels(config, number)
    model = Decoder(config, TensorLoader(weights, number, device, kernels.row_product, kernels.ops))
    capture = CudaCapture() if device.type == "cuda" else NoCapture()
    eager = EagerRunner(model, kernels.backend, device)
    served = GraphRunner(eager, kv, kernels.decode, capture, config.context_tokens, BATCH_BUCKETS[-1])
    plain = EagerRunner(model, SdpaBackend(), device)
    return Work(config, layout), {
        "baton": TorchEngine(model, kv, served, device), "sdpa": TorchEngine(model, kv, plain, device),
    }  # fmt: skip


def part(index: int, tokens: list[int], start: int, *, sample: bool) -> Slice:
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    return Slice(
        request_id=RequestId(f"request-{index}"), tokens=tokens, start=start, count=len(tokens) - start,
        block_table=[BlockId(index * blocks + block) for block in range(blocks)], sample=sample,
        sampling=Sampling(temperature=0.0), prompt_tokens=len(tokens),
    )  # fmt: skip


def step_s(engine: TorchEngine, step: Step, repeats: int) -> float:
    """Return the median time of a step. It ends when its kernels have."""
    engine.execute(step)
    times: list[float] = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        engine.execute(step)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def measure(
    name: str, folder: Path, sizes: Sizes, limits: Ceilings, budget: Budget, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time the steps of one model, while the budget lasts."""
    work, loaded = engines(folder, sizes.blocks, device)
    vocab, context = work.config.vocab_tokens, sizes.context_tokens
    found: dict[str, dict[str, float]] = {}
    steps: list[tuple[str, Step, float]] = []
    for batch in sizes.batches:
        texts = [[(index * 31 + at) % vocab for at in range(context)] for index in range(batch)]
        step = Step(tuple(part(index, text, context - 1, sample=True) for index, text in enumerate(texts)))
        floor_s = work.floor_s(limits, batch, batch * context, batch * context)
        steps.append((f"decode {batch} x {context}", step, floor_s))
    for prompt in sizes.prompts:
        step = Step((part(0, [at % vocab for at in range(prompt)], 0, sample=True),))
        steps.append((f"prefill {prompt}", step, work.floor_s(limits, prompt, prompt, prompt * (prompt + 1) // 2)))
    for case, step, floor_s in steps:
        if not budget.allows(f"{name} {case}"):
            continue
        found[case] = {}
        for kind, engine in loaded.items():
            spent_s = step_s(engine, step, sizes.repeats)
            found[case] |= {f"{kind}_s": spent_s, f"{kind}_floor_ratio": floor_s / spent_s}
        words = ", ".join(f"{kind} {found[case][f'{kind}_s'] * 1e3:.2f} ms" for kind in loaded)
        print(f"{name} {case}: {words}, floor {floor_s * 1e3:.2f} ms", flush=True)
    return found


def measure_models(
    models: Sequence[Path], sizes: Sizes, limits: Ceilings, budget: Budget, device: torch.device, out: Path
) -> None:
    """Time the steps of models. Write the result after each one: a later one may fail, or be killed."""
    results = described(device, limits)
    for folder in models:
        load_s = resolve_model(str(folder), "dummy").weight_bytes / LOAD_BYTES_PER_S
        if budget.allows(folder.name, load_s):
            results[folder.name] = measure(folder.name, folder, sizes, limits, budget, device)
        record.store("gpu-model", {**results, "left_out_for_time": budget.left_out}, out)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    args = arguments(__doc__)
    lacks = missing(rehearse=args.rehearse)
    if lacks:
        print(f"gpu_model: not run: {lacks}")
        return 0
    device, budget = torch.device("cpu" if args.rehearse else "cuda"), Budget(args.seconds)
    sizes = REHEARSED if args.rehearse else WHOLE
    with torch.inference_mode(), tempfile.TemporaryDirectory() as small_models:
        models = [SHAPES / name for name in MODELS]
        if args.rehearse:
            models = [Path(small(name, Path(small_models) / name)) for name in MODELS]
        limits = ceilings(device, rehearse=args.rehearse)
        measure_models(models, sizes, limits, budget, device, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
