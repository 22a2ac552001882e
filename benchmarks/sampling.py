"""Measure the CPU time of sampling 32 rows of SmolLM2's vocabulary, for several sampling options.

python benchmarks/sampling.py [--rows 32] [--repeats 7]

Logits are normally distributed with a deviation of 3.5, like those of a small model: about a thousand tokens have 95 %
of the probability. One thread samples, between two steps. Each figure is the minimum of the repeats.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import record

from baton.compute.sampler import sample
from baton.core.step import Slice
from baton.core.types import BlockId, RequestId, Sampling

VOCAB = 49_152
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
    record.write("sampling", {"rows": args.rows, "vocab": VOCAB, "cpu_s": cpu_s})


if __name__ == "__main__":
    main()
