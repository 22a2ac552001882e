"""API keys."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.services import HttpSettings
from tests.http.conftest import House

KEYS = ("first-key", "second-schlüssel")


@pytest.fixture
def locked(build: Callable, serve: Callable) -> httpx.Client:
    return serve(build(keys=KeySources(api_keys=KEYS)))


@pytest.mark.parametrize(
    "sent", [None, "", "Bearer", "Bearer wrong", "Bearer first-key2", "Basic first-key", "first-key"]
)
def test_without_a_known_key_everything_is_a_401(locked: httpx.Client, sent: str | None) -> None:
    headers = {} if sent is None else {"authorization": sent}
    for method, path in [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")]:
        response = locked.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.json()["error"]["code"] in ("missing_api_key", "invalid_api_key")


def test_probes_and_the_page_need_no_key(locked: httpx.Client) -> None:
    assert [locked.get(path).status_code for path in ("/health", "/ready", "/ui")] == [200, 200, 200]


def test_every_key_opens(locked: httpx.Client) -> None:
    for key in KEYS:
        headers = {"authorization": f"bearer {key}".encode()}
        assert locked.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200


def test_the_tenant_of_a_key_does_not_depend_on_the_client() -> None:
    """Fair shares are counted by tenant, so a client gets no second share by inventing a `user`."""
    keyring = Keyring(KeySources(api_keys=KEYS))
    assert keyring.identify({b"authorization": b"Bearer first-key"}).tenant == "key-0"
    assert keyring.identify({b"authorization": "Bearer second-schlüssel".encode()}).tenant == "key-1"
    assert Keyring().identify({}).tenant == ""


ROLE, LOG, HOSTS = "/cluster/workers/inprocess-0/role", "/cluster/log", "/cluster/hosts"


def _statuses(app: ASGIApp, key: str) -> dict[str, int]:
    """Return the status of one request to each kind of route."""
    client = TestClient(app, base_url="http://localhost", headers={"authorization": f"Bearer {key}"} if key else {})
    return {
        "generate": client.post("/tokenize", json={"prompt": "a"}).status_code,
        "role": client.post(ROLE, json={"role": "mixed"}).status_code,
        "log": client.get(LOG).status_code,
        "join": client.post(HOSTS, json={}).status_code,
        "models": client.get("/v1/models").status_code,
    }


OPEN = {"generate": 200, "role": 200, "log": 404, "join": 409, "models": 200}
"""The answers of a server in one process: it has no log and takes no hosts."""


@pytest.mark.parametrize(
    ("sources", "key", "expected"),
    [
        (KeySources(), "", OPEN),
        (KeySources(api_keys=("only",)), "only", OPEN),
        (KeySources(api_keys=("a", "b")), "a", OPEN | {"role": 403, "log": 403, "join": 403}),
        (KeySources(api_keys=("a",), admin_key="root"), "a", OPEN | {"role": 403, "log": 403, "join": 403}),
        (KeySources(api_keys=("a",), admin_key="root"), "root", OPEN | {"generate": 403}),
        (KeySources(api_keys=("a",), admin_key="root"), "", dict.fromkeys(OPEN, 401)),
        (KeySources(admin_key="root"), "", OPEN | {"role": 401, "log": 401, "join": 401}),
        (KeySources(admin_key="root"), "root", OPEN | {"generate": 403}),
        (KeySources(join_key="j"), "j", OPEN | {"generate": 403, "role": 403, "log": 403}),
        (KeySources(join_key="j"), "", OPEN | {"join": 401}),
    ],
)
def test_a_key_opens_the_routes_of_its_scopes_only(
    build: Callable[..., House], sources: KeySources, key: str, expected: dict[str, int]
) -> None:
    assert _statuses(build(keys=sources).app, key) == expected


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/cluster/models"])
def test_a_client_key_loads_no_model(build: Callable[..., House], path: str) -> None:
    app = build(keys=KeySources(api_keys=("a", "b"))).app
    client = TestClient(app, base_url="http://localhost", headers={"authorization": "Bearer a"})
    assert client.post(path, json={}).json()["error"]["code"] == "missing_scope"


def test_a_refusal_names_the_missing_scope_and_the_remedy(build: Callable[..., House]) -> None:
    app = build(keys=KeySources(api_keys=("a", "b"))).app
    client = TestClient(app, base_url="http://localhost", headers={"authorization": "Bearer a"})
    error = client.post(ROLE, json={"role": "mixed"}).json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "missing_scope")
    assert "'admin'" in error["message"]
    assert "--admin-key" in error["message"]


def test_a_port_of_its_own_is_the_only_one_with_admin_routes(build: Callable[..., House]) -> None:
    app = build(settings=HttpSettings(admin_port=9000)).app
    for port, role in ((8000, 403), (9000, 200)):
        client = TestClient(app, base_url=f"http://localhost:{port}")
        response = client.post(ROLE, json={"role": "mixed"})
        assert response.status_code == role
        assert client.get("/cluster").status_code == 200
    refused = TestClient(app, base_url="http://localhost:8000").post(HOSTS, json={})
    assert "port 9000" in refused.json()["error"]["message"]
