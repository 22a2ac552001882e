"""Measure parts of the torch engine for models that are not dense: latent attention and a mixture of experts.

python benchmarks/model_parts.py [--repeats 5]      one thread, float32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import record
import torch

from baton.compute.models.model_config import Experts, Latent
from baton.compute.torch.kernels.latent import LatentPlan, UpProjection, expansion_is_cheaper
from baton.compute.torch.kernels.linear import make_linear
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.experts import ExpertMlp, Router, SeparateExperts
from baton.compute.torch.layers.mlp import GatedMlp
from baton.decide.kv.layout import KVLayout

HEADS, BLOCK_TOKENS, PREFIX_TOKENS = 16, 16, 2048
DEEPSEEK_LITE = Latent(
    q_rank=None, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, score_scale=192**-0.5, rope_pairs=True
)
HIDDEN, WIDTH = 1024, 512
MIXTURE = Experts(layers=(0,), count=32, per_token=4, intermediate=WIDTH, normalized=True)


def latent_forms(repeats: int) -> dict[str, dict[str, float | bool]]:
    """Time one layer of DeepSeek-V2-Lite's attention after a prefix, in both forms, in turns."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=576, block_tokens=BLOCK_TOKENS, dtype="float32", planes=1)
    blocks = torch.arange((PREFIX_TOKENS + 1024) // BLOCK_TOKENS)
    kv = PagedKV(torch.zeros(layout.block_bytes * len(blocks), dtype=torch.uint8), layout)
    kv.data.normal_()
    up = UpProjection(torch.randn(HEADS, 128, 512) / 512**0.5, torch.randn(HEADS, 512, 128) / 512**0.5)
    found: dict[str, dict[str, float | bool]] = {}
    for count in (1, 16, 64, 128, 256, 512):
        row = Row(0, count, PREFIX_TOKENS, blocks[: -(-(PREFIX_TOKENS + count) // BLOCK_TOKENS)])
        nope, rope, all_tokens = torch.randn(count, HEADS, 128), torch.randn(count, HEADS, 64), torch.arange(count)
        absorbed = LatentPlan(DEEPSEEK_LITE, kv, SdpaBackend().plan([row], kv), all_tokens, ())
        expanded = LatentPlan(DEEPSEEK_LITE, kv, None, all_tokens, [row])
        times = interleaved(
            {
                "absorbed_s": lambda plan=absorbed, nope=nope, rope=rope: plan.run(0, nope, rope, up),
                "expanded_s": lambda plan=expanded, nope=nope, rope=rope: plan.run(0, nope, rope, up),
            },
            repeats,
        )
        difference = (absorbed.run(0, nope, rope, up) - expanded.run(0, nope, rope, up)).abs().max()
        found[f"{count}_tokens"] = {
            **times,
            "largest_difference": float(difference),
            "expands": expansion_is_cheaper(row, DEEPSEEK_LITE),
        }
    return found


def experts(repeats: int) -> dict[str, dict[str, float]]:
    """Time a layer of 32 experts, 4 of them per token; compare a token alone with the same token in the batch."""
    mlps = [
        GatedMlp(make_linear(torch.randn(2 * WIDTH, HIDDEN) / 32), make_linear(torch.randn(HIDDEN, WIDTH) / 22))
        for _ in range(MIXTURE.count)
    ]
    mixture = ExpertMlp(Router(torch.randn(MIXTURE.count, HIDDEN), None, MIXTURE), SeparateExperts(mlps), None)
    expert_bytes = 3 * WIDTH * HIDDEN * 4
    found: dict[str, dict[str, float]] = {}
    for count in (1, 8, 32, 256):
        hidden = torch.randn(count, HIDDEN)
        touched = len(mixture.router.choose(hidden)[0].unique())
        times = interleaved({"layer_s": lambda hidden=hidden: mixture(hidden)}, repeats)
        difference = (mixture(hidden)[-1] - mixture(hidden[-1:])[0]).abs().max()
        found[f"{count}_tokens"] = {
            **times,
            "experts_touched": touched,
            "weights_gb_per_s": touched * expert_bytes / times["layer_s"] / 1e9,
            "largest_difference_to_alone": float(difference),
        }
    return found


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run the calls in turns, and return the minimum of each in seconds."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats + 1):
        for name, call in calls.items():
            started_s = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - started_s)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        record.write("model-parts", {"latent": latent_forms(args.repeats), "experts": experts(args.repeats)})


if __name__ == "__main__":
    main()
