"""API keys."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from baton.serve.http.edge import authenticate
from baton.serve.http.services import HttpSettings

KEYS = ("first-key", "second-schlüssel")


@pytest.fixture
def locked(build: Callable, serve: Callable) -> httpx.Client:
    return serve(build(settings=HttpSettings(block_tokens=16, api_keys=KEYS)))


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


def test_the_key_says_who_asks() -> None:
    """Fair shares are counted by key, so nobody gets a second share by making up a `user`."""
    assert authenticate({b"authorization": b"Bearer first-key"}, KEYS) == "key-0"
    assert authenticate({b"authorization": "Bearer second-schlüssel".encode()}, KEYS) == "key-1"
    assert authenticate({}, ()) == ""
