"""Foreign web pages: a browser on this machine sends their requests, and the server refuses them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from baton.core.errors import RequestError
from baton.serve.http.browser import BrowserRules
from baton.serve.http.services import HttpSettings
from tests.http.conftest import House

ROLE = "/cluster/workers/inprocess-0/role"
POSTS = (
    ROLE,
    "/cluster/hosts",
    "/cluster/restart",
    "/cluster/scale",
    "/tokenize",
    "/detokenize",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
)


def _client(house: House, base_url: str = "http://localhost:8000") -> TestClient:
    return TestClient(house.app, base_url=base_url)


@pytest.mark.parametrize("path", ["/health", "/cluster", "/ui", "/v1/models"])
def test_a_foreign_host_name_is_refused(build: Callable[..., House], path: str) -> None:
    """A page of evil.example whose name points to this machine would otherwise count as the server's own."""
    response = _client(build(), "http://evil.example:8000").get(path)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host evil.example" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", POSTS)
def test_a_page_of_another_origin_changes_nothing(build: Callable[..., House], path: str) -> None:
    for origin in ("http://evil.example", "null", "http://localhost:3000"):
        response = _client(build()).post(path, json={"role": "decode"}, headers={"origin": origin})
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", None])
def test_a_body_without_the_type_of_json_is_a_415(build: Callable[..., House], path: str, kind: str | None) -> None:
    """A browser sends text/plain, and bodies without a type, to foreign servers without asking them."""
    headers = {} if kind is None else {"content-type": kind}
    assert _client(build()).post(path, content=b'{"role": "decode"}', headers=headers).status_code == 415


def test_the_servers_own_page_may_change_its_state(build: Callable[..., House]) -> None:
    response = _client(build()).post(ROLE, json={"role": "decode"}, headers={"origin": "http://localhost:8000"})
    assert response.status_code == 200


def test_responses_are_not_readable_for_other_origins_by_default(build: Callable[..., House]) -> None:
    client = _client(build())
    response = client.get("/cluster", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in response.headers
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.options(ROLE, headers=preflight).headers


def test_pages_of_an_allowed_origin_may_use_the_server(build: Callable[..., House]) -> None:
    origin = "https://chat.example.com"
    client = _client(build(settings=HttpSettings(cors_origins=(origin,))))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = client.options("/tokenize", headers={"origin": origin, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    response = client.post("/tokenize", json={"prompt": "a"}, headers={"origin": origin})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, origin)
    assert client.post("/tokenize", json={}, headers={"origin": "http://evil.example"}).status_code == 403


def test_every_response_has_a_content_security_policy(build: Callable[..., House]) -> None:
    client = _client(build())
    for response in (client.get("/ui"), client.get("/cluster"), client.get("/nowhere"), client.post("/tokenize")):
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/chat"])
def test_no_script_inside_a_page_may_run(build: Callable[..., House], path: str) -> None:
    """A script that a model's answer brings into the page is not a file of this server."""
    response = _client(build()).get(path)
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self';" in policy
    assert not re.search(r"<script>|<style|style=|onclick", response.text)


def _is_allowed(rules: BrowserRules, host: str, origin: str = "", method: str = "POST") -> bool:
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    try:
        rules.check(method, headers, dict(headers))
    except RequestError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost.", "10.0.0.7:8000"]
)
def test_loopback_names_and_the_bound_address_are_allowed(host: str) -> None:
    assert _is_allowed(BrowserRules(bound_host="10.0.0.7"), host)


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.8", "::", "[::1]evil.example"]
)
def test_other_names_and_addresses_are_refused(host: str) -> None:
    assert not _is_allowed(BrowserRules(bound_host="10.0.0.7"), host)


def test_a_server_at_every_address_takes_every_address_but_no_foreign_name() -> None:
    """An address is never rebound: only names are."""
    rules = BrowserRules(bound_host="0.0.0.0")
    assert _is_allowed(rules, "10.0.0.8:8000")
    assert _is_allowed(rules, "[fe80::1]:8000")
    assert not _is_allowed(rules, "evil.example")


def test_added_names_and_a_star_are_allowed() -> None:
    assert _is_allowed(BrowserRules(bound_host="127.0.0.1", hosts=("Chat.Example.com",)), "chat.example.com:443")
    assert _is_allowed(BrowserRules(bound_host="127.0.0.1", hosts=("*",)), "anything.example")


def test_two_host_headers_are_refused() -> None:
    headers = [(b"host", b"localhost"), (b"host", b"evil.example")]
    with pytest.raises(RequestError, match="2 headers host"):
        BrowserRules(bound_host="127.0.0.1").check("GET", headers, dict(headers))


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost", "http://localhost:80", True),
        ("localhost:443", "https://localhost", True),
        ("localhost:8000", "http://localhost:8001", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("", "http://localhost", False),
    ],
)
def test_an_origin_is_the_servers_own_if_host_and_port_agree(host: str, origin: str, allowed: bool) -> None:
    assert _is_allowed(BrowserRules(bound_host="127.0.0.1"), host, origin) == allowed


def test_reading_is_no_change() -> None:
    """Without CORS, a foreign page cannot see the response."""
    assert _is_allowed(BrowserRules(bound_host="127.0.0.1"), "localhost", "http://evil.example", method="GET")
