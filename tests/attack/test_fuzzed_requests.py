"""2,000 fuzzed requests for each route, by 8 clients at once: each is served, or refused with a clear 4xx."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.attack.conftest import RunningServer, unharmed
from tests.attack.test_hostile_model_files import mutate_bytes, mutate_json

pytestmark = pytest.mark.deep

REQUESTS = 2000
THREADS = 8
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}, "y": {"$ref": "#/$defs/t"}}, "required": ["x"]}
SCHEMA |= {"$defs": {"t": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "a"}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "42"},
]
SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "logit_bias": {"70": 1.5},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
POSTS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "The tide", "max_tokens": 4, "logprobs": 2, "stop": ["x"], "seed": 3, "user": "u", **SAMPLING},
        {"prompt": [5, 6, 7], "n": 2, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": ["a", "b"], "echo": True, "max_tokens": 2, "cache_salt": "s", "priority": 1},
        {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[a-c]{2}-[0-9]+"}},
        {"prompt": "a", "max_tokens": 9, "response_format": FORMAT},
    ],
    "/v1/chat/completions": [
        {"messages": TALK, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "stream": True},
        {"messages": TALK[:2], "max_completion_tokens": 9, "tools": [TOOL], "tool_choice": "required"},
        {"messages": TALK[1:2], "max_tokens": 9, "response_format": FORMAT, **SAMPLING},
        {"messages": TALK[1:2], "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}},
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}, {"input": [5, 6, 7], "dimensions": 16}],
    "/tokenize": [{"prompt": "The tide", "add_special_tokens": True}, {"messages": TALK, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/cluster/workers/{worker}/role": [{"role": "mixed"}],
    "/cluster/hosts": [{"a": 1}],
}
GETS = (
    *("/v1/models", "/v1/models/hash", "/health", "/ready", "/metrics", "/cluster", "/cluster/log"),
    *("/ui", "/", "/favicon.ico", "/openapi.json", "/version"),
)
STATUSES = {200, 204, 307, 400, 403, 404, 405, 413, 415, 429, 431}
BOUND = re.compile(r"\d.*\b(limits|http|sandbox|policy)\.\w+", re.DOTALL)
TYPES = ("application/json", "application/json; charset=utf-8", "text/plain", "application/xml", "", "a" * 5000)


def body_of(seeds: list[dict[str, Any]], rng: random.Random) -> bytes:
    """Return a mutated body: of JSON with odd values in odd places, of cut, repeated and flipped bytes, or of both."""
    value = json.loads(json.dumps(rng.choice(seeds)))
    data = json.dumps(mutate_json(value, rng) if rng.random() < 0.7 else value).encode()
    return mutate_bytes(data, rng, len(data)) if rng.random() < 0.4 else data


def headers_of(rng: random.Random) -> dict[str, str]:
    """Return headers, most of them those of a client that wants an answer."""
    headers = {"content-type": rng.choice(TYPES) if rng.random() < 0.05 else TYPES[0]}
    if rng.random() < 0.1:
        names = ("x-request-id", "origin", "host", "authorization", "content-encoding", "accept", "cookie", "expect")
        headers[rng.choice(names)] = "".join(chr(rng.randrange(0x21, 0x7F)) for _ in range(rng.choice((1, 20, 9000))))
    return headers


def path_of(path: str, rng: random.Random) -> str:
    """Return a path, most often with a query, sometimes with odd characters in it."""
    query = "".join(rng.choice("?&=%/.;a0é~") for _ in range(rng.choice((0, 3, 30))))
    return path + (query if rng.random() < 0.1 else f"?{query}" if query else "")


def check(response: httpx.Response) -> int:
    """A refusal has OpenAI's body, and one for a limit names the limit and its setting. Return the status."""
    status = response.status_code
    assert status in STATUSES, f"{status}: {response.text[:500]}"
    if status >= 400:
        error = response.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"]
        if status in (413, 429, 431):
            assert BOUND.search(error["message"]), error["message"]
    return status


def fuzz(server: RunningServer, path: str, seeds: list[dict[str, Any]], part: int) -> Counter[int]:
    """Send one client's part of the requests for a route. Return how often each status came."""
    rng = random.Random(f"{path} {part}")
    found: Counter[int] = Counter()
    with server.client() as client:
        for _ in range(REQUESTS // THREADS):
            if seeds:
                sent = {"content": body_of(seeds, rng), "headers": headers_of(rng)}
                response = client.post(path, **sent)
            else:
                method = rng.choice(("GET", "GET", "GET", "HEAD", "OPTIONS", "DELETE", "PUT", "X"))
                sent = {"method": method, "url": path_of(path, rng), "headers": headers_of(rng)}
                response = client.request(**sent)
            if response.request.method == "HEAD" or response.headers.get("content-length") == "0":
                assert response.status_code in STATUSES, sent
                continue
            try:
                found[check(response)] += 1
            except (AssertionError, ValueError, KeyError) as error:
                raise AssertionError(f"{path}: {error}; sent: {str(sent)[:2000]}") from error
    return found


@pytest.mark.parametrize("path", POSTS)
def test_fuzzed_bodies(target: RunningServer, control: RunningServer, path: str) -> None:
    worker = target.cluster()["workers"][0]
    route = path.format(worker=worker["id"])
    with unharmed(target, control), ThreadPoolExecutor(THREADS) as threads:
        found = sum(threads.map(lambda part: fuzz(target, route, POSTS[path], part), range(THREADS)), Counter())
    assert found[200] > REQUESTS // 50, found
    assert found[400] > REQUESTS // 50 or path == "/cluster/hosts", found  # its body is not read
    with target.client() as client:
        client.post(f"/cluster/workers/{worker['id']}/role", json={"role": worker["role"]}).raise_for_status()


def test_fuzzed_reading(target: RunningServer, control: RunningServer) -> None:
    with unharmed(target, control), ThreadPoolExecutor(THREADS) as threads:
        for path in GETS:
            found = sum(threads.map(lambda part, path=path: fuzz(target, path, [], part), range(THREADS)), Counter())
            assert found[405] > REQUESTS // 50, (path, found)
