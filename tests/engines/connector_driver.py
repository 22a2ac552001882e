"""vLLM itself with BatonConnector, as a program in vLLM's environment: `connector_driver.py MODEL STORE`.

It answers one prompt twice without a prefix cache of its own, and prints as JSON what it has found.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from vllm import LLM, SamplingParams

from baton.integrations.vllm.block_copies import BlockCopies
from baton.integrations.vllm.block_plan import StepCopies

PROMPT = "The river ran past the old mill, and the miller counted his sacks before the rain came down again. " * 14
LISTED_S = 2.5
"""Time in which the connector lists the store at least once."""
copied: dict[str, int] = {}
"""Calls with blocks by layer."""


class CountedCopies(BlockCopies):
    def copy_layer(self, name: str, copies: StepCopies) -> None:
        super().copy_layer(name, copies)
        copied[name] = copied.get(name, 0) + bool(copies.awaited or copies.writes)


def main(model: str, store: str) -> None:
    import baton.integrations.vllm.connector as connector

    connector.BlockCopies = CountedCopies
    kv: dict[str, Any] = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store},
    }
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_transfer_config=kv,
    )
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    answers: list[dict[str, object]] = []
    for _ in range(2):
        (answer,) = llm.generate([PROMPT], sampling, use_tqdm=False)
        answers.append({"tokens": [*answer.outputs[0].token_ids], "cached": answer.num_cached_tokens})
        threading.Event().wait(LISTED_S)
    print("\n" + json.dumps({"answers": answers, "copied": copied}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
