"""Measure the CPU time of sampling 32 rows of SmolLM2's vocabulary, for several sampling options.

python benchmarks/sampling.py [--rows 32] [--repeats 7]

Logits are normally distributed with a deviation of 3.5, like those of a small model: about a thousand tokens have 95 %
of the probability. One thread samples, between two steps. Each figure is the minimum of the repeats.

`device_host_cpu_s` is the time that the sampler of a GPU takes of the host's CPU for 64 rows: planning, and launching
torch's operations on a vocabulary so small that their arithmetic is negligible. Before, it draws the tokens of the
host's sampler from the large vocabulary, or the program fails.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import record
import torch
from msgspec import structs

from baton.compute.sampler import HostSampler, sample
from baton.compute.torch.sampler import DeviceSampler
from baton.core.step import Slice
from baton.core.types import BlockId, RequestId, Sampling

VOCAB = 49_152
LAUNCH_VOCAB = 512
LAUNCH_ROWS = 64
DIFFERING_MAX = 1
"""Draws of a batch that may differ between the samplers: those at the edge between two tokens."""
ASKED = {
    "greedy": Sampling(temperature=0.0),
    "temperature 1": Sampling(temperature=1.0),
    "top_k 50": Sampling(temperature=0.7, top_k=50),
    "top_p 0.9": Sampling(temperature=1.0, top_p=0.9),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95),
    "top_p 0.95, top_k 50, min_p 0.02": Sampling(temperature=1.0, top_p=0.95, top_k=50, min_p=0.02),
    "5 log probabilities": Sampling(temperature=1.0, top_logprobs=5),
}


def row(index: int, sampling: Sampling) -> Slice:
    return Slice(
        request_id=RequestId(str(index)),
        tokens=[index],
        start=0,
        count=1,
        block_table=[BlockId(0)],
        sample=True,
        sampling=sampling,
        prompt_tokens=1,
    )


def launch_s(logits: torch.Tensor, sampling: Sampling, repeats: int) -> float:
    """Return the CPU seconds of the device's sampler for a batch [rows, vocab] with options."""
    rows = [row(index, sampling) for index in range(len(logits))]
    taken: list[float] = []
    with torch.inference_mode():
        for _ in range(repeats):
            begun_s = time.process_time()
            DeviceSampler().draw(logits, rows)
            taken.append(time.process_time() - begun_s)
    return min(taken)


def check(logits: np.ndarray, sampling: Sampling) -> None:
    """Exit if the samplers draw different tokens. Every row has a seed of its own."""
    rows = [row(index, structs.replace(sampling, seed=index)) for index in range(len(logits))]
    expected, found = (each.draw(torch.from_numpy(logits), rows) for each in (HostSampler(), DeviceSampler()))
    tokens = [[[token for token, _ in drawn] for drawn, _ in each] for each in (expected, found)]
    differing = sum(one != other for one, other in zip(*tokens, strict=True))
    if differing > DIFFERING_MAX:
        raise SystemExit(f"the samplers draw {differing} of {len(rows)} tokens differently with {sampling}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    logits = (np.random.default_rng(0).standard_normal((args.rows, VOCAB)) * 3.5).astype(np.float32)
    cpu_s: dict[str, float] = {}
    for name, sampling in ASKED.items():
        rows, taken = [row(index, sampling) for index in range(args.rows)], list[float]()
        for _ in range(args.repeats):
            begun_s = time.process_time()
            sample(logits, rows)
            taken.append(time.process_time() - begun_s)
        cpu_s[name] = min(taken)
        print(f"{name:34} {cpu_s[name] * 1e3:6.1f} ms")
    torch.set_num_threads(1)
    few = torch.from_numpy(logits[:1, :LAUNCH_VOCAB].copy()).expand(LAUNCH_ROWS, -1).contiguous()
    device_s: dict[str, float] = {}
    for name, sampling in ASKED.items():
        check(logits, sampling)
        device_s[name] = launch_s(few, sampling, args.repeats)
        print(f"{name:34} {device_s[name] * 1e3:6.2f} ms of the host's CPU for {LAUNCH_ROWS} rows on a device")
    figures = {"rows": args.rows, "vocab": VOCAB, "cpu_s": cpu_s}
    record.write("sampling", {**figures, "device_rows": LAUNCH_ROWS, "device_host_cpu_s": device_s})


if __name__ == "__main__":
    main()
