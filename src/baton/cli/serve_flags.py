"""The flags of `baton serve`, by their subject."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from baton.cli.foreign_flags import DTYPES, tokens
from baton.cli.key_flags import ADMIN_KEY, API_KEY, ENGINE_KEY
from baton.core.config import AttentionName, WeightsChoice
from baton.core.kv_config import KVDtypeChoice
from baton.core.launching import Launcher


def add_api(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the names, adapters and fields that clients see."""
    parser.add_argument(
        "--served-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients; further ones mean the same model (repeatable; default: its own name)",
    )
    parser.add_argument(
        "--served-model-name",
        dest="served_name",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="the same, for commands written for vLLM",
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=FOLDER",
        help="serve LoRA adapters of MODEL beside it, each as a model of its own",
    )
    parser.add_argument(
        "--metrics-names", choices=("baton", "vllm"), help="vllm: /metrics has vLLM's metrics as well (default: baton)"
    )
    parser.add_argument(
        "--otlp",
        action="store_true",
        default=None,
        help="send a trace and metrics of each request by OTLP; docs/operations.md",
    )
    parser.add_argument("--batch-folder", metavar="DIR", help="keep files and batches in DIR, over restarts")
    parser.add_argument(
        "--strict-api", action="store_true", default=None, help="reject unknown fields of requests (default: ignore)"
    )


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the flags for servers of another engine, and for a system that starts hosts."""
    parser.add_argument(
        "--engine-url",
        action="append",
        metavar="[ROLE=]URL",
        help="a worker of --engine (default: vllm); llamacpp=URL: llama.cpp; openai=URL: OpenAI's API (repeatable)",
    )
    parser.add_argument("--engine-pods", metavar="LABELS", help="pods with vLLM servers, such as app=vllm")
    parser.add_argument(
        "--engine",
        choices=("baton", "vllm", "sglang", "openai"),
        help="engine at --engine-url, else of started servers",
    )
    parser.add_argument("--engine-command", metavar="CMD", help="servers' program (default: --engine)")
    parser.add_argument("--engine-flags", metavar="FLAGS", help="servers' further flags, one text")
    parser.add_argument("--engine-store", metavar="URL", help="store for servers' KV, like --tier")
    parser.add_argument("--engine-key-file", type=Path, metavar="FILE", help=f"their key (default: {ENGINE_KEY})")
    parser.add_argument(
        "--launcher",
        choices=get_args(Launcher),
        help="ray: hosts run on Ray; external: another system scales (default: local)",
    )


def add_computing(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the device, the precision and the parallelism of the workers."""
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights for a folder with only config.json"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", *DTYPES), help="precision; half and float16 select bfloat16"
    )
    parser.add_argument(
        "--weights", choices=get_args(WeightsChoice), help="form of the weights in memory (default: dense)"
    )
    parser.add_argument(
        "--attention-backend", choices=get_args(AttentionName), help="implementation of attention (default: auto)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each worker (default: cores / workers)")
    add_parallel(parser)
    add_rank_options(parser)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the KV cache and the limits of requests and steps."""
    parser.add_argument(
        "--kv-dtype",
        choices=get_args(KVDtypeChoice),
        help="precision of the KV cache (default: as --dtype)",
    )
    parser.add_argument("--kv-blocks", type=int, metavar="N", help="KV blocks of the host (default: 2 GiB)")
    parser.add_argument(
        "--block-tokens", "--block-size", type=int, metavar="N", help="tokens in a KV block (default: 16)"
    )
    parser.add_argument(
        "--tier",
        action="append",
        metavar="URL",
        help="keep KV below the arena, such as in file:///var/cache/kv?bytes=100e9 (repeatable, the fastest first)",
    )
    parser.add_argument(
        "--context-tokens",
        "--max-model-len",
        type=tokens,
        metavar="N",
        help="maximum tokens of a request (default: all)",
    )
    parser.add_argument(
        "--step-tokens",
        "--max-num-batched-tokens",
        type=tokens,
        metavar="N",
        help="maximum tokens of a step (default: 512)",
    )
    parser.add_argument(
        "--batch-requests",
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="requests that a worker runs at once (default: 64)",
    )


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags for API keys, the admin port and other access of clients."""
    parser.add_argument(
        "--api-key", action="append", metavar="K", help="require this bearer key (repeatable); docs/security.md"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"file with keys, one per line (default: {API_KEY})"
    )
    parser.add_argument("--keys", metavar="FILE", help="key file of `baton keys`")
    parser.add_argument("--admin-key", metavar="K", help=f"key with the scopes admin and join (default: {ADMIN_KEY})")
    parser.add_argument("--admin-port", type=int, metavar="P", help="port of its own for admin and join routes")
    parser.add_argument("--admin-host", metavar="H", help="address of --admin-port (default: 127.0.0.1)")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert (PEM)")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="allow an address beyond loopback without keys"
    )
    parser.add_argument(
        "--allowed-host", action="append", metavar="NAME", help="further name of this server (repeatable)"
    )
    parser.add_argument(
        "--cors-origin", action="append", metavar="O", help="origin of web pages that may use it (repeatable)"
    )


def add_parallel(parser: argparse.ArgumentParser, *, default: str = "1") -> None:
    """Add the flags for tensor and pipeline parallelism."""
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help=f"tensor-parallel ranks of each worker (default: {default})",
    )
    parser.add_argument(
        "--pp",
        "--pipeline-parallel-size",
        type=int,
        metavar="N",
        help=f"pipeline stages of each worker (default: {default})",
    )


DBO_TOKENS = 512
"""Tokens of a step from which `--enable-dbo` overlaps, as vLLM's `--dbo-prefill-token-threshold` by default."""


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ranks that hosts take from the server they join."""
    parser.add_argument(
        "--dcp",
        "-dcp",
        "--decode-context-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel ranks that divide the tokens of a KV head (default: 1)",
    )
    parser.add_argument(
        "--dp",
        "-dp",
        "--data-parallel-size",
        type=int,
        metavar="N",
        help="ranks of each worker with requests of their own, and shared experts (default: 1)",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help="ranks hold whole experts, not a part of each",
    )
    parser.add_argument(
        "--enable-dbo",
        action="store_const",
        const=DBO_TOKENS,
        help=f"steps of {DBO_TOKENS} tokens and more run as two micro-batches",
    )
