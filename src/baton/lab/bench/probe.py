"""Check before a run that the server answers, and which prompt format it accepts."""

from __future__ import annotations

import os
from dataclasses import dataclass

import aiohttp
import msgspec
from msgspec import Struct

from baton.core.errors import BatonError
from baton.lab.bench.client import Client, Response
from baton.lab.bench.options import BenchOptions, Endpoint, PromptFormat
from baton.lab.bench.wire import error_text, read_usage, request_fields
from baton.lab.workload.prompts import PromptMaker
from baton.lab.workload.request import TraceRequest

PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
_PROMPT_TOKENS = 16
_EXTRA_TOKENS_MAX = 2
"""Begin-of-sequence tokens that the server may add to the ids that were sent."""


class TargetError(BatonError):
    """The server under test cannot be measured: unreachable, not ready, or refusing every prompt format."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answered the probe."""

    model: str
    path: str
    endpoint: Endpoint
    prompt_format: PromptFormat


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


async def probe(client: Client, options: BenchOptions) -> Target:
    """Return the server's model and prompt format, after a test request for one token.

    Unless a prompt format is given, token ids are tried before text. Raises TargetError with the server's answer and
    the flag that may help.
    """
    try:
        model = options.model if options.model is not None else await _first_model(client)
        prompt_format = await _prompt_format(client, options, model)
    except TimeoutError as error:
        raise TargetError(f"{options.url} does not answer within {options.timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"cannot reach {options.url}: {_why(error)}; is the server running there?") from error
    return Target(model, PATHS[options.endpoint], options.endpoint, prompt_format)


async def _first_model(client: Client) -> str:
    response = await client.get("/models")
    if response.status != 200:
        raise TargetError(_answer_text("GET /models", response) + "; give the model's name with --model")
    try:
        return msgspec.json.decode(response.body, type=_Models).data[0].id
    except (msgspec.DecodeError, IndexError) as error:
        raise TargetError("GET /models names no model; give its name with --model") from error


async def _prompt_format(client: Client, options: BenchOptions, model: str) -> PromptFormat:
    """Return the requested format; by default ids if the server reads them as ids, else text."""
    request = TraceRequest(at_s=0.0, input_tokens=_PROMPT_TOKENS, output_tokens=1)
    maker = PromptMaker(seed=~options.seed, vocab_tokens=options.vocab_tokens)  # differs from all prompts of the run
    path = PATHS[options.endpoint]
    formats: tuple[PromptFormat, ...] = ("ids", "text") if options.prompt_format is None else (options.prompt_format,)
    response = Response(0, b"")
    for prompt_format in formats:
        body = request_fields(
            model=model,
            endpoint=options.endpoint,
            prompt=maker.token_ids(request, 0) if prompt_format == "ids" else maker.text(request, 0),
            output_tokens=1,
            ignore_eos=options.ignore_eos,
            stream=False,
        )
        response = await client.post(path, msgspec.json.encode(body))
        if response.status in (401, 403):
            raise TargetError(_answer_text(f"POST {path}", response) + "; give the right key with --api-key")
        if response.status in (429, 503):
            raise TargetError(_answer_text(f"POST {path}", response) + "; wait until the server is ready and idle")
        counted = read_usage(response.body).prompt_tokens or _PROMPT_TOKENS
        as_meant = prompt_format == "text" or 0 <= counted - _PROMPT_TOKENS <= _EXTRA_TOKENS_MAX
        if response.status == 200 and (as_meant or len(formats) == 1):
            return prompt_format
    raise TargetError(_answer_text(f"POST {path}", response) + "; try --endpoint, --model or --no-ignore-eos")


def _why(error: aiohttp.ClientError | OSError) -> str:
    """Return the operating system's error message, such as `Connection refused`, without aiohttp's own words."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error)


def _answer_text(question: str, response: Response) -> str:
    return f"{question} was answered with HTTP {response.status}: {error_text(response.body)}"
