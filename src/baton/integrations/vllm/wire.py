"""Request and response bodies of vLLM 0.32's HTTP interface (`vllm/entrypoints/scale_out/token_in_token_out`).

`/inference/v1/generate` takes and returns token ids. On servers without that route, `/v1/completions` does the same
with `return_token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from baton.integrations.engines.http import ErrorInfo, samples
from baton.integrations.engines.port import Choice, EngineLoad, Generation

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
ABORT = "/inference/v1/abort_requests"
_SEED_MASK = 2**63 - 1
ASK_FOR_KV: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` of a prompt whose KV another server will load."""


class Answer(Struct, frozen=True):
    """A complete answer, or one event of a stream."""

    choices: list[Choice] = []
    kv_transfer_params: dict[str, Any] | None = None
    error: ErrorInfo | None = None


class Version(Struct, frozen=True):
    version: str = ""


def generate_body(generation: Generation, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body for `/inference/v1/generate`."""
    return {
        "request_id": generation.id,
        "model": model,
        "token_ids": list(generation.tokens),
        "sampling_params": {**_sampling(generation), "detokenize": False},
        "stream": stream,
        **_extras(generation),
    }


def completions_body(generation: Generation, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body for `/v1/completions` with the same meaning as `generate_body`."""
    return {
        "request_id": generation.id,
        "model": model,
        "prompt": list(generation.tokens),
        "add_special_tokens": False,
        "return_token_ids": True,
        "stream": stream,
        **_sampling(generation),
        **_extras(generation),
    }


def _sampling(generation: Generation) -> dict[str, Any]:
    """Return all sampling parameters, because the server would replace omitted ones by defaults of its model."""
    sampling, begun = generation.sampling, generation.output_tokens
    is_prompt = generation.hands_off
    return {
        "n": 1,
        "max_tokens": 1 if is_prompt else generation.tokens_max,
        "min_tokens": 0 if is_prompt else min(generation.tokens_max, max(0, sampling.output_tokens_min - begun)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        # vLLM seeds a request, not a position: a continued answer must not draw its first numbers again.
        "seed": None if sampling.temperature == 0 else (sampling.seed + begun) & _SEED_MASK,
        "stop_token_ids": [] if is_prompt else list(sampling.stop_token_ids),
        "ignore_eos": True,  # `stop_token_ids` has the model's, unless the client ignores them
    }


def _extras(generation: Generation) -> dict[str, Any]:
    params = ASK_FOR_KV if generation.hands_off else generation.kv_transfer_params
    extras: dict[str, Any] = {} if params is None else {"kv_transfer_params": params}
    return {**extras, "cache_salt": generation.cache_salt} if generation.cache_salt else extras


def read_load(metrics: str) -> EngineLoad:
    """Return the load of a server from the text of its metrics, summed over its engine cores."""
    totals: dict[str, float] = {}
    kv_tokens = 0
    for name, labels, value in samples(metrics, "vllm:"):
        if name == "vllm:cache_config_info":
            kv_tokens += _cache_tokens(labels)
        else:
            totals[name] = totals.get(name, 0.0) + value
    cores = max(1, metrics.count("\nvllm:kv_cache_usage_perc{"))
    return EngineLoad(
        running_requests=int(totals.get("vllm:num_requests_running", 0)),
        waiting_requests=int(totals.get("vllm:num_requests_waiting", 0)),
        kv_used_ratio=min(1.0, totals.get("vllm:kv_cache_usage_perc", 0.0) / cores),
        kv_tokens=kv_tokens,
        started_unix_s=totals.get("process_start_time_seconds", 0.0),
    )


def _cache_tokens(labels: Mapping[str, str]) -> int:
    blocks, block_tokens = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(block_tokens) if blocks.isdigit() and block_tokens.isdigit() else 0
