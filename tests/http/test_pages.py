"""Everything that generates nothing."""

from __future__ import annotations

import json
import re

import httpx
import pytest


def test_models_say_how_long_a_request_may_be(client: httpx.Client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("hash", "model", 4096)
    assert client.get("/v1/models/hash").json() == model
    assert client.get("/v1/models/other/name").json()["error"]["code"] == "model_not_found"


def test_tokens_go_there_and_back(client: httpx.Client) -> None:
    made = client.post("/tokenize", json={"prompt": "Grüße 🙂"}).json()
    assert made["count"] == len(made["tokens"]) == 12
    assert made["max_model_len"] == 4096
    assert client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Grüße 🙂"}


def test_a_conversation_is_tokenized_as_a_chat_would_be(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_tokenize_wants_one_of_two(client: httpx.Client, body: dict[str, object]) -> None:
    assert client.post("/tokenize", json=body).status_code == 400


def test_detokenize_refuses_what_is_no_token(client: httpx.Client) -> None:
    for tokens in ([259], [-1], ["a"], 5, [True]):
        assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_health_is_200_once_ready(client: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        assert client.get(path).json() == {"status": "ready"}
        assert client.head(path).status_code == 200


def test_before_it_is_ready_everything_that_needs_the_cluster_is_a_503(build, serve) -> None:
    house = build()
    house.gateway.state = "loading"
    client = serve(house)
    for response in (
        client.get("/health"),
        client.get("/ready"),
        client.post("/v1/completions", json={"prompt": "a"}),
        client.post("/v1/completions", json={"prompt": "a", "stream": True}),
    ):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "not_ready"
        assert "loading" in response.json()["error"]["message"]
    assert client.get("/v1/models").status_code == 200


def test_metrics_are_prometheus_text(client: httpx.Client) -> None:
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text.endswith("baton_up 1\n")


def test_the_cluster_shows_its_workers_and_their_roles_can_be_changed(build, serve) -> None:
    client = serve(build())
    [worker] = client.get("/cluster").json()["workers"]
    assert set(worker) == {
        "id",
        "role",
        "pid",
        "state",
        "running",
        "waiting",
        "kv_blocks_used",
        "kv_blocks_total",
        "host",
        "role_reason",
        "attention_backend",
    }
    path = f"/cluster/workers/{worker['id']}/role"
    assert client.post(path, json={"role": "decode"}).json() == {"id": worker["id"], "role": "decode"}
    assert client.get("/cluster").json()["workers"][0]["role"] == "decode"
    refused = client.post(path, json={"role": "king"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == 'role must be "decode" or "mixed" or "prefill", got "king"'
    assert client.post("/cluster/workers/nobody/role", json={"role": "decode"}).status_code == 404


@pytest.mark.parametrize("path", ["/", "/ui", "/chat"])
def test_pages_load_only_files_of_this_server(client: httpx.Client, path: str) -> None:
    page = client.get(path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]*)"', page.text)
    assert loaded
    while loaded:
        name = loaded.pop()
        assert name.startswith("/static/")
        file = client.get(name)
        assert file.status_code == 200
        assert "http" not in re.findall(r"(?:src=|href=|url\(|import .* from )[\"']?(\w+)", file.text)
        loaded += ["/static/" + other for other in re.findall(r'from "\./([^"]+)"', file.text)]


def test_other_names_below_static_are_no_files(client: httpx.Client) -> None:
    for name in ("index.html", "none.js", "..%2fpages.py", "uplot.LICENSE.txt"):
        assert client.get(f"/static/{name}").status_code == 404
    assert client.get("/favicon.ico").status_code == 204


def test_the_openapi_document_covers_every_path_and_resolves(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"} < set(
        document["paths"]
    )
    for reference in re.findall(r'"\$ref": ?"#/([^"]*)"', json.dumps(document)):
        part = document
        for step in reference.split("/"):
            part = part[step]
    for operations in document["paths"].values():
        for operation in (operations.get("get"), operations.get("post")):
            assert operation is None or "200" in operation["responses"]


def test_the_version_is_the_packages(client: httpx.Client) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/version").json()["version"])


def test_a_head_of_the_event_stream_ends(client: httpx.Client) -> None:
    """A response without a body that never ends would keep its connection from the next request."""
    assert client.head("/cluster/events").status_code == 200
    assert client.get("/health").status_code == 200
