"""Values and flags of other servers: read them where `baton serve` has the same setting, else say which one is near."""

from __future__ import annotations

import argparse
import re

_SUFFIXES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")

DTYPES = {"half": "bfloat16", "float16": "bfloat16", "float": "float32"}
"""Values of vLLM's `--dtype` that Baton does not have, and the nearest one."""

_ALWAYS = "leave it out: Baton always does so"
_NEVER = "leave it out: Baton never does so"
_NEAREST = {
    # vLLM
    "--gpu-memory-utilization": "the KV cache takes --kv-blocks N (or kv.bytes in --config), 2 GiB by default",
    "--kv-cache-memory-bytes": "set kv.bytes in --config, or --kv-blocks N",
    "--kv-cache-dtype": "use --kv-dtype",
    "--swap-space": "use --tier URL, which keeps KV below the arena",
    "--cpu-offload-gb": "weights stay in memory; --weights int8 halves them, and --tier URL takes KV",
    "--quantization": "use --weights int8, or a .gguf file as MODEL",
    "--prefill-context-parallel-size": "use --tp N --dcp N",
    "--cp-kv-cache-interleave-size": "leave it out: --dcp N gives each rank block_tokens / N tokens of each block",
    "--dbo-prefill-token-threshold": "set parallel.overlap_tokens_min in --config",
    "--dbo-decode-token-threshold": "set parallel.overlap_tokens_min in --config",
    "--kv-transfer-config": "use --prefill N --decode N: KV is handed over without further settings",
    "--speculative-config": "set the section speculation in --config",
    "--scheduling-policy": "set policy.batching in --config; a request has `priority`",
    "--seed": "set seed in --config; a request has `seed`",
    "--enable-prefix-caching": _ALWAYS,
    "--no-enable-prefix-caching": "the prefix cache stays on; a request with a `cache_salt` of its own shares nothing",
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--disable-log-requests": "leave it out: Baton logs no prompt",
    "--disable-log-stats": "leave it out: Baton prints no statistics; see /metrics",
    "--tool-call-parser": "leave it out: tool calls have one format, which a grammar enforces",
    "--trust-remote-code": "leave it out: Baton runs no code of a model's folder",
    "--enforce-eager": _ALWAYS,
    "--enable-lora": "leave it out: --lora-modules NAME=FOLDER, or POST /v1/load_lora_adapter, is enough",
    "--max-loras": "leave it out: a server has up to 32 models, adapters included",
    "--max-lora-rank": "leave it out: an adapter is added to the weights when it is loaded",
    "--chat-template": "the model's own template is used; edit it in the model's folder",
    "--tokenizer": "the model's own tokenizer is used",
    "--revision": "download that revision, and give its folder as MODEL",
    "--download-dir": "download the model, and give its folder as MODEL",
    "--ssl-certfile": "use --tls-cert",
    "--ssl-keyfile": "use --tls-key",
    "--allowed-origins": "use --cors-origin, once for each",
    "--otlp-traces-endpoint": "use --otlp, and name the receiver in OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "--collect-detailed-traces": "use --otlp: a trace always has the spans queue, prefill, handoff and decode",
    # SGLang
    "--enable-trace": "use --otlp, and name the receiver in OTEL_EXPORTER_OTLP_ENDPOINT",
    "--model-path": "use --model",
    "--context-length": "use --context-tokens",
    "--mem-fraction-static": "the KV cache takes --kv-blocks N (or kv.bytes in --config), 2 GiB by default",
    "--max-running-requests": "use --batch-requests",
    "--chunked-prefill-size": "use --step-tokens",
    "--page-size": "use --block-tokens",
    "--tp-size": "use --tp",
    "--lora-paths": "use --lora-modules NAME=FOLDER",
    "--enable-two-batch-overlap": "use --enable-dbo",
    "--ep-size": "use --tp N --enable-expert-parallel",
    "--dp-size": "use --mixed N, or --prefill N --decode N; with experts also --dp N --enable-expert-parallel",
    "--pp-size": "use --pp",
    "--dcp-size": "use --dcp",
    "--disaggregation-mode": "use --prefill N --decode N; further machines join with `baton host --join URL`",
    # llama.cpp
    "-m": "give the file as MODEL",
    "-c": "use --context-tokens",
    "--ctx-size": "use --context-tokens",
    "-t": "use --threads",
    "-np": "use --batch-requests",
    "--parallel": "use --batch-requests",
    "-b": "use --step-tokens",
    "--batch-size": "use --step-tokens",
    "--ubatch-size": "use --step-tokens",
    "-ngl": "use --device cuda: all layers run there",
    "--n-gpu-layers": "use --device cuda: all layers run there",
    "--cache-type-k": "use --kv-dtype, for keys and values together",
    "--cache-type-v": "use --kv-dtype, for keys and values together",
    "--cont-batching": _ALWAYS,
    "--jinja": _ALWAYS,
    "--metrics": "leave it out: /metrics is always there",
    "--lora": "use --lora-modules NAME=FOLDER",
    "--slot-save-path": "use --tier URL, which keeps KV below the arena",
    "--slots": "leave it out: /cluster/requests shows the running requests",
    "--embedding": "leave it out: /v1/embeddings is always there",
    "--mlock": _NEVER,
    "--alias": "use --served-name",
}  # fmt: skip


def nearest_setting(flag: str) -> str:
    """Return what `baton serve` has instead of a flag of vLLM, SGLang or llama.cpp. Empty: the flag is unknown."""
    return _NEAREST.get(flag, "")


def tokens(text: str) -> int:
    """Return a number of tokens: 4096, 4k (4,000), 4K (4,096). `auto` and -1 are 0, which means all."""
    if text in ("auto", "-1"):
        return 0
    found = _TOKENS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; give one such as 4096, 4k or auto")
    return int(float(found[1]) * _SUFFIXES.get(found[2], 1))
