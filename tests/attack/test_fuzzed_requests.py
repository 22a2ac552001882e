"""2,000 fuzzed requests for each route, by 8 clients at once: each is served, or refused with a clear 4xx."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.compute.hash_engine import hash_card
from baton.serve.http.batches.routes import BATCHES_PATH, FILES_PATH
from baton.serve.http.identity import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from baton.serve.http.model_routes import MODELS_PATH
from baton.serve.http.wire.openapi import openapi_document
from tests.attack.conftest import RunningServer, check_alive, unharmed, warm_up
from tests.attack.refusals import check_refusal
from tests.attack.test_hostile_model_files import mutate_bytes, mutate_json
from tests.http.test_schemathesis import run_schemathesis
from tests.serving import NO_TLS, all_workers_ready, serving

pytestmark = pytest.mark.timeout(900)

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
ROLE, RESTART, HOSTS = "/cluster/workers/{worker}/role", "/cluster/restart", "/cluster/hosts"
LOG, EVENTS, EXPLAIN = "/cluster/log", "/cluster/events", "/cluster/explain/{request}"
STORED, INPUT_TOKENS = "/v1/responses/{response}", "/v1/responses/input_tokens"
INPUT_ITEMS = STORED + "/input_items"
CHAT = "/v1/chat/completions/{chat}"
CHAT_MESSAGES = CHAT + "/messages"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
DRAIN, CANCEL, SCALE = "/cluster/hosts/{host}/drain", "/cluster/cancel", "/cluster/scale"
FILE, CONTENT, BATCH = FILES_PATH + "/{upload}", FILES_PATH + "/{upload}/content", BATCHES_PATH + "/{batch}"
ADMIN_KEY = "the-key-of-the-operator"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
FORM_TYPE = "multipart/form-data; boundary=XYZ"
UPLOADS = "id-of-the-upload"
"""Stands for the id of a real file in bodies."""
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
    "/v1/responses": [
        {"input": "The tide", "max_output_tokens": 4, "instructions": "Be brief.", "stream": True},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], "max_output_tokens": 4},
    ],
    MESSAGES: [
        {"model": "m", "messages": TALK[1:2], "max_tokens": 4, "system": "Be brief.", "stream": True},
        {"model": "m", "messages": TALK[1:2], "max_tokens": 4, "temperature": 0.5, "stop_sequences": ["x"]},
    ],
    CHAT: [{"metadata": {"topic": "a"}}],
    COUNT: [{"model": "m", "messages": TALK[1:2]}],
    INPUT_TOKENS: [{"input": "The tide", "instructions": "Be brief."}],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}, {"input": [5, 6, 7], "dimensions": 16}],
    "/tokenize": [{"prompt": "The tide", "add_special_tokens": True}, {"messages": TALK, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    ROLE: [{"role": "mixed"}],
    SCALE: [{"role": "prefill", "workers": None}],
    RESTART: [{"workers": ["decode-7"]}],
    DRAIN: [{"a": 1}],
    CANCEL: [{"id": "unknown"}],
    HOSTS: [{"a": 1}],
}
FILING: dict[str, list[dict[str, Any]]] = {
    FILE: [],
    CONTENT: [],
    BATCHES_PATH: [{"input_file_id": UPLOADS, "endpoint": "/v1/completions", "completion_window": "24h"}],
    BATCH: [],
    BATCH + "/cancel": [{"a": 1}],
    MODELS_PATH: [{"model": "/nowhere", "name": "other", "prefill": 1, "kv": {"bytes": 1 << 20}}],
    LOAD_ADAPTER_PATH: [{"lora_name": "other", "lora_path": "/nowhere"}],
    UNLOAD_ADAPTER_PATH: [{"lora_name": "other"}],
    FILES_PATH: [LINE],
}
"""Routes of files, batches and models, attacked on a server of their own. Uploads come last: they fill its folder."""
GETS = (
    *("/v1/models", "/v1/models/{model}", STORED, "/health", "/ready", "/ping", "/metrics", "/cluster", LOG, EVENTS),
    *("/tokenizer_info", "/cluster/requests", EXPLAIN, INPUT_ITEMS, CHAT_MESSAGES),
    *("/ui", "/", "/chat", "/docs", "/static/{file}", "/favicon.ico", "/openapi.json", "/version"),
)
UNDOCUMENTED = {"/", "/static/{file}", "/favicon.ico", HOSTS, MODELS_PATH, LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH}
NOT_FOUND = (STORED, INPUT_ITEMS, CHAT, CHAT_MESSAGES, LOG, EXPLAIN, CANCEL)
USUAL_STATUS = {"/favicon.ico": 204, DRAIN: 409, **dict.fromkeys(NOT_FOUND, 404)}
"""The answer to a valid request, where that is not 200: there is no log, no such request, and no joined host."""
STATUSES = {200, 204, 400, 401, 403, 404, 405, 409, 413, 415, 429, 431, 503, 507}
"""503: the server sees a little later that a reader of events is gone."""
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "X")
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


def request_of(path: str, rng: random.Random) -> dict[str, Any]:
    """Return a request, most often with the method of its route."""
    seeds, headers = POSTS.get(path) or FILING.get(path, []), headers_of(rng)
    method = rng.choice(METHODS) if rng.random() < 0.2 else "POST" if seeds else "GET"
    content = body_of(seeds or [{"a": [1, "b"]}], rng) if method in ("POST", "PUT", "PATCH") else None
    if path == FILES_PATH and content is not None:
        content = form_of(content, rng)
        headers["content-type"] = FORM_TYPE
    return {"method": method, "url": path_of(path, rng), "headers": headers, "content": content}


def form_of(line: bytes, rng: random.Random) -> bytes:
    """Return the form of an upload, often a mutated one."""
    part = b"--XYZ\r\nContent-Disposition: form-data; name="
    data = part + b'"purpose"\r\n\r\nbatch\r\n' + part + b'"file"; filename="in"\r\n\r\n' + line + b"\n\r\n--XYZ--\r\n"
    return mutate_bytes(data, rng, len(data)) if rng.random() < 0.5 else data


def check(response: httpx.Response) -> int:
    """Fail for another status than that of a success or of a clear refusal. Return the status."""
    status = response.status_code
    assert status in STATUSES, f"{status}: {response.text[:500]}"
    assert status != 503 or response.json()["error"]["code"] == "too_many_readers", response.text
    if status >= 400 and response.request.method != "HEAD":
        check_refusal(status, response.content)
    return status


def request_once(client: httpx.Client, sent: dict[str, Any]) -> httpx.Response:
    """Send a request and read its response: of endless events the first."""
    if EVENTS not in sent["url"]:
        return client.request(**sent)
    with client.stream(**sent) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream") and sent["method"] != "HEAD":
            next(response.iter_raw())
        else:
            response.read()
        return response


def fuzz(url: str, path: str, names: dict[str, str], part: int, keys: tuple[str, ...] = ("",)) -> Counter[int]:
    """Send one client's part of the requests for a route. Return how often each status came.

    `names`: those of the worker, the model and the file in the path or the body. `keys`: one of them is sent.
    """
    rng = random.Random(f"{path} {part}")
    found: Counter[int] = Counter()
    with httpx.Client(timeout=60, verify=NO_TLS) as client:
        for _ in range(REQUESTS // THREADS):
            sent, key = request_of(path, rng), rng.choice(keys)
            sent["url"] = url + sent["url"].format(**names)  # httpx takes `//a` alone for a host
            if sent["content"]:
                sent["content"] = sent["content"].replace(UPLOADS.encode(), names["upload"].encode())
            if key:
                sent["headers"]["authorization"] = f"Bearer {key}"
            try:
                found[check(request_once(client, sent))] += 1
            except (AssertionError, ValueError, KeyError, httpx.TransportError) as error:
                raise AssertionError(f"{path}: {error!r}; sent: {str(sent)[:2000]}") from error
    return found


def fuzz_by_all(url: str, path: str, names: dict[str, str], keys: tuple[str, ...] = ("",)) -> Counter[int]:
    """Send all requests for a route, by several clients at once. Return how often each status came."""
    with ThreadPoolExecutor(THREADS) as threads:
        return sum(threads.map(lambda part: fuzz(url, path, names, part, keys), range(THREADS)), Counter())


def names_of(server: RunningServer) -> dict[str, str]:
    state = server.cluster()
    own = {"worker": state["workers"][0]["id"], "host": state["hosts"][0]["id"]}
    unknown = dict.fromkeys(("request", "response", "chat", "upload", "batch"), "unknown")
    return {**own, **unknown, "model": "hash", "file": "chat.js"}


def test_every_route_is_attacked() -> None:
    documented = openapi_document(hash_card(), "1", choices_max=1, is_strict=True)["paths"]
    assert {*POSTS, *FILING, *GETS} - UNDOCUMENTED == {*documented}


@pytest.fixture(scope="module")
def filing() -> Iterator[tuple[RunningServer, dict[str, str]]]:
    """A server, and the names of its parts and of a batch."""
    with serving("hash") as server:
        warm_up(server)
        fields = {"input_file_id": upload(server), "endpoint": LINE["url"]}
        with server.client() as client:
            batch = client.post(BATCHES_PATH, json=fields).raise_for_status().json()["id"]
        yield server, {**names_of(server), "batch": batch}


def upload(server: RunningServer) -> str:
    """Upload the file of a batch. Return its id."""
    form = {"purpose": (None, "batch"), "file": ("in.jsonl", json.dumps(LINE))}
    with server.client() as client:
        return client.post(FILES_PATH, files=form).raise_for_status().json()["id"]


@pytest.mark.deep
@pytest.mark.parametrize("path", FILING)
def test_fuzzed_requests_for_files_batches_and_models(
    filing: tuple[RunningServer, dict[str, str]], control: RunningServer, path: str
) -> None:
    """A file may be deleted on the way. No model is loaded: no path of a request has one."""
    server, names = filing[0], {**filing[1], "upload": upload(filing[0])}
    with unharmed(server, control):
        found = fuzz_by_all(server.url, path, names)
    assert found.total() == REQUESTS
    assert found[405] > REQUESTS // 50, found
    assert found[400] + found[404] > REQUESTS // 50, found
    assert found[200] > 0 or path in (LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH), found
    with server.client() as client:
        models = client.get(MODELS_PATH).raise_for_status().json()["models"]
        assert [model["id"] for model in models] == ["hash"]


@pytest.mark.deep
@pytest.mark.parametrize("path", [path for path in (*POSTS, *GETS) if path != RESTART])
def test_fuzzed_requests(target: RunningServer, control: RunningServer, path: str) -> None:
    role = target.cluster()["workers"][0]["role"]
    with unharmed(target, control):
        found = fuzz_by_all(target.url, path, names_of(target))
    assert found.total() == REQUESTS
    assert found[405] > REQUESTS // 50, found
    assert found[USUAL_STATUS.get(path, 200)] > 0, found
    assert found[400] > REQUESTS // 50 or path not in POSTS or path == HOSTS, found  # the body for a host is not read
    if path == ROLE:
        set_role(target, role)


@pytest.mark.deep
def test_fuzzed_restarts() -> None:
    """Those without a worker's name restart all workers, so no stream is watched."""
    with serving("hash") as server:
        found = fuzz_by_all(server.url, RESTART, names_of(server))
        assert found[400] + found[404] > REQUESTS // 50, found
        server.wait_until(all_workers_ready, reason="the workers have restarted")
        check_alive(server)


def set_role(server: RunningServer, role: str) -> None:
    with server.client() as client:
        client.post(ROLE.format(**names_of(server)), json={"role": role}).raise_for_status()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, str]]:
    """A server with an admin key and a decision log, and the URL of its admin port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    log = tmp_path_factory.mktemp("guarded") / "log"
    arguments = ("--admin-port", str(port), "--admin-key", ADMIN_KEY, "--log", str(log))
    with serving("hash", *arguments) as server:
        warm_up(server)
        yield server, f"http://127.0.0.1:{port}"


@pytest.mark.deep
@pytest.mark.parametrize("path", [ROLE, HOSTS, LOG])
def test_fuzzed_requests_at_the_ports_of_a_guarded_server(
    guarded: tuple[RunningServer, str], control: RunningServer, path: str
) -> None:
    """Only the admin key at the admin port does anything."""
    server, admin_url = guarded
    with unharmed(server, control):
        refused = fuzz_by_all(server.url, path, names_of(server), ("", "guess", ADMIN_KEY))
        unknown = fuzz_by_all(admin_url, path, names_of(server), ("", "guess"))
        served = fuzz_by_all(admin_url, path, names_of(server), ("", "guess", ADMIN_KEY))
    assert not refused[200], refused
    assert not unknown[200], unknown
    assert refused[403] > REQUESTS // 2, refused
    assert unknown[401] > REQUESTS // 2, unknown
    assert served[200] > REQUESTS // 50, served


@pytest.mark.deep
def test_schemathesis_beside_another_client(target: RunningServer, control: RunningServer, tmp_path: Path) -> None:
    """Requests made from the OpenAPI document, with its examples, its limits and beyond them.

    An operator may restart and retire workers, and end the streams of others: those routes are left out.
    """
    roles = {worker["id"]: worker["role"] for worker in target.cluster()["workers"]}
    with unharmed(target, control):
        found = run_schemathesis(target.url, tmp_path, random_examples=200, excluded=(RESTART, CANCEL, SCALE))
    assert found.returncode == 0, found.stdout + found.stderr
    with target.client() as client:
        for worker, role in roles.items():
            client.post(ROLE.format(worker=worker), json={"role": role}).raise_for_status()
