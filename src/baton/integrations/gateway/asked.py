"""Read what a request to a picked server asks for: the size and blocks of its prompt, its answer's limit and its SLO.

The picker has no tokenizer: it counts four bytes of the prompt's JSON as one token. So it takes the same time for every
model, and prompts that begin alike have the same first blocks.
"""

from __future__ import annotations

import json
from array import array
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping
from typing import cast
from zlib import crc32

import msgspec
from msgspec import Raw, Struct

from baton.core.errors import RequestError
from baton.core.types import BlockHash, HostId, Request, RequestId, Slo
from baton.decide.kv.hashing import block_hashes
from baton.serve.http.slo import TPOT_HEADER, TTFT_HEADER, asked_slo, header_slo
from baton.serve.http.wire.schemas import SloFields

BLOCK_TOKENS = 64
TOKEN_BYTES = 4
"""Bytes of a prompt that count as one token."""
_OUTPUT_TOKENS = 256
"""Assumed limit of an answer without one."""
_OUTPUT_TOKENS_MAX = 4096
_PROMPT_TOKENS_MAX = 1 << 20
_TENANT = b"x-llm-d-inference-fairness-id"
_TENANT_BYTES_MAX = 128
_SLO_HEADERS = {
    b"x-llm-d-slo-ttft-ms": TTFT_HEADER.encode(),
    b"x-llm-d-slo-tpot-ms": TPOT_HEADER.encode(),
}
"""Headers of llm-d, and those of Baton with the same meaning."""
TOPOLOGY_FIELDS = (
    *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank"),
)
"""Fields that steer connections between engines, so that clients must not send them."""
_TOPOLOGY_BYTES = tuple(map(str.encode, TOPOLOGY_FIELDS))
_EXTRA = "vllm_xargs"
"""An object in the body. vLLM treats its fields, of any name, like its own arguments of the engine."""


class _Body(Struct):
    model: str = ""
    prompt: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()
    token_ids: Raw = Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    slo: SloFields | None = None

    def prompt_bytes(self) -> memoryview:
        """Return the JSON of the prompt without its end, so that a longer conversation begins with the same bytes."""
        views = map(memoryview, (self.messages, self.prompt, self.input, self.token_ids))
        return next((view for view in views if view), memoryview(b""))[:-1]

    def output_tokens_max(self) -> int:
        given = next(
            (each for each in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens) if each), None
        )
        return min(_OUTPUT_TOKENS_MAX, max(1, given or _OUTPUT_TOKENS))


_DECODER = msgspec.json.Decoder(_Body)


def read_request(
    number: int, headers: Mapping[bytes, bytes], body: bytes, hosts: tuple[HostId, ...], now_s: float
) -> Request:
    """Return the request as policies see it. Raises RequestError (400) for an invalid SLO.

    `number`: unique among the requests of this picker. `hosts`: the only servers that the proxy allows; empty: all.
    """
    try:
        asked = _DECODER.decode(body) if body else _Body()
    except (msgspec.DecodeError, RecursionError):
        asked = _Body()  # the picked server answers what is wrong with it
    prompt = asked.prompt_bytes()[: _PROMPT_TOKENS_MAX * TOKEN_BYTES]
    tenant = headers.get(_TENANT, b"")[:_TENANT_BYTES_MAX]
    return Request(
        id=RequestId(_request_id(number, headers)),
        prompt_tokens=max(1, len(prompt) // TOKEN_BYTES),
        block_hashes=_hashes(prompt, f"{asked.model}\0{asked.cache_salt or ''}"),
        output_tokens_max=asked.output_tokens_max(),
        arrived_at_s=now_s,
        slo=_slo(headers, asked.slo),
        tenant=tenant.decode("latin-1"),
        client=crc32(tenant),
        hosts=hosts,
    )


def _request_id(number: int, headers: Mapping[bytes, bytes]) -> str:
    return headers.get(b"x-request-id", b"")[:64].decode("latin-1") or f"pick-{number}"


def _hashes(prompt: memoryview, salt: str) -> tuple[BlockHash, ...]:
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES
    tokens = array("I")
    tokens.frombytes(prompt[: len(prompt) // block_bytes * block_bytes])
    return block_hashes(tokens, block_tokens=BLOCK_TOKENS, cache_salt=salt)


def _slo(headers: Mapping[bytes, bytes], body: SloFields | None) -> Slo | None:
    known = {ours: headers[theirs] for theirs, ours in _SLO_HEADERS.items() if theirs in headers}
    return asked_slo(header_slo({**known, **headers}), body, None)


def without_topology(body: bytes) -> bytes:
    """Return the body without the fields that would steer connections between engines.

    It is read as engines read it, with Python's `json`: a name may be escaped, and the text may be in UTF-16. A body
    that is no JSON object is returned as it is, since an engine refuses it. Raises RequestError (400) for a body that
    is nested too deep to be read here, since an engine may read it.
    """
    if not _may_steer(body):
        return body
    try:
        found = json.loads(body)
        if not isinstance(found, dict):
            return body
        fields = cast("dict[str, object]", found)
        kept = _without(fields)
        if isinstance(fields.get(_EXTRA), dict):
            kept[_EXTRA] = _without(cast("dict[str, object]", fields[_EXTRA]))
        return body if kept == fields else json.dumps(kept).encode()
    except ValueError:
        return body
    except RecursionError:
        reason = f"the body is nested too deep to be searched for {TOPOLOGY_FIELDS[0]}; send fewer levels"
        raise RequestError(reason, status=400) from None


def _without(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in TOPOLOGY_FIELDS}


def _may_steer(body: bytes) -> bool:
    """Return False if the body surely names no topology field. Most bodies end here, unread."""
    return (
        any(name in body for name in _TOPOLOGY_BYTES)
        or b"\\u" in body
        or b"\0" in body[:4]
        or body.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    )
