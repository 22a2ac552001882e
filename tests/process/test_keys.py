"""Keys of a running server: none is visible in its processes, and the key file is read again on SIGHUP."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.cli.main import main
from baton.core.keys import read_keys
from tests.serving import RunningServer, serving

ADMIN_KEY = "the-admin-key"


class Tenants:
    """A server with a key file, and its tenants' keys."""

    def __init__(self, server: RunningServer, file: Path) -> None:
        self.server = server
        self.file = file

    def add(self, capsys: pytest.CaptureFixture[str], tenant: str) -> str:
        """Add a key to the file, and return it."""
        assert main(["keys", "add", "--keys", str(self.file), "--tenant", tenant]) == 0
        return capsys.readouterr().out.strip()

    def reload(self) -> None:
        """Tell the server to read the file, and wait until it has said so."""
        said = self.server.output().count("SIGHUP: the key file was read again")
        self.server.process.send_signal(signal.SIGHUP)
        with self.server.client() as client:
            for _ in range(10_000):  # each waits for the server
                client.get("/health")
                if self.server.output().count("SIGHUP: the key file was read again") > said:
                    return
        raise AssertionError(f"the key file was not read again:\n{self.server.output()}")

    def post(self, key: str, prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 1}
        with self.server.client() as client:
            return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    def cached_tokens(self, key: str, prompt: str) -> int:
        return self.post(key, prompt).raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text('{"keys": []}')
    file.chmod(0o600)
    with serving("hash", "--keys", str(file), environment={"BATON_ADMIN_KEY": ADMIN_KEY}) as server:
        yield Tenants(server, file)


def test_a_key_works_after_sighup_and_no_longer_once_revoked(
    tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tenants.add(capsys, "acme")
    assert tenants.post(key, "a").status_code == 401
    tenants.reload()
    assert tenants.post(key, "a").status_code == 200
    assert main(["keys", "revoke", read_keys(tenants.file).keys[-1].id, "--keys", str(tenants.file)]) == 0
    tenants.reload()
    assert tenants.post(key, "a").status_code == 401


def test_the_same_prompt_is_a_prefix_hit_within_a_tenant_only(
    tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    first, same, other = (tenants.add(capsys, tenant) for tenant in ("acme", "acme", "other"))
    tenants.reload()
    prompt = "a secret of acme " * 20
    assert tenants.cached_tokens(first, prompt) == 0
    assert tenants.cached_tokens(other, prompt) == 0
    assert tenants.cached_tokens(same, prompt) > 300
    assert tenants.cached_tokens(other, prompt) > 300, "its own blocks by now"


def test_a_tenant_can_neither_join_hosts_nor_read_decisions(
    tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tenants.add(capsys, "acme")
    tenants.reload()
    with tenants.server.client() as client:
        headers = {"authorization": f"Bearer {key}"}
        for response in (
            client.post("/cluster/hosts", json={}, headers=headers),
            client.get("/cluster/log", headers=headers),
            client.post("/cluster/workers/decode-0/role", json={"role": "mixed"}, headers=headers),
        ):
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "missing_scope"


def test_no_process_shows_or_inherits_a_key(tenants: Tenants) -> None:
    shown = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    assert ADMIN_KEY not in shown
    with tenants.server.client() as client:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        workers = client.get("/cluster", headers=headers).raise_for_status().json()["workers"]
    for worker in workers:
        assert ADMIN_KEY.encode() not in Path(f"/proc/{worker['pid']}/environ").read_bytes()


def test_only_an_administrator_sees_the_metrics_of_tenants(
    tenants: Tenants, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tenants.add(capsys, "counted")
    tenants.reload()
    tenants.post(key, "abc").raise_for_status()
    with tenants.server.client() as client:
        shown, hidden = (
            client.get("/metrics", headers={"authorization": f"Bearer {each}"}).raise_for_status().text
            for each in (ADMIN_KEY, key)
        )
    for series in ('tokens_total{kind="prompt",', 'tokens_total{kind="output",', 'requests_total{outcome="finished",'):
        [value] = [
            line.split()[1] for line in shown.splitlines() if line.startswith(f'baton_tenant_{series}tenant="counted"')
        ]
        assert float(value) == (3 if "prompt" in series else 1)
    assert "tenant" not in hidden
    assert "baton_requests_total" in hidden
