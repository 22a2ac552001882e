"""`baton keys`, and where commands find their keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.cli.main import build_parser, main
from baton.cli.serve import configuration
from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.core.keys import digest_of, read_keys


def configured(*flags: str) -> Config:
    return configuration(build_parser(["serve"]).parse_args(["serve", *flags]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Add a key and return it."""
    assert main(["keys", "add", "--keys", str(file), *flags]) == 0
    return capsys.readouterr().out.strip()


def test_a_new_key_is_stored_as_a_hash_in_a_private_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = add(file, capsys, "--tenant", "acme", "--scope", "admin", "--streams-max", "3", "--classes", "gold")
    (entry,) = read_keys(file).keys
    assert entry.sha256 == digest_of(key.encode())
    assert (entry.tenant, entry.scopes, entry.limits.streams_max) == ("acme", ("admin",), 3)
    assert entry.limits.classes == ("gold",)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(key) > 40
    assert list(file.parent.iterdir()) == [file], "no temporary file is left"


@pytest.mark.parametrize("exists", [True, False])
def test_the_target_of_a_link_is_replaced(
    exists: bool, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers that read the target see the change."""
    link = tmp_path / "links" / "keys.json"
    link.parent.mkdir()
    link.symlink_to(file)
    if exists:
        add(file, capsys, "--tenant", "a")
    add(link, capsys, "--tenant", "b")
    assert link.is_symlink()
    assert [entry.tenant for entry in read_keys(file).keys] == (["a", "b"] if exists else ["b"])
    assert list(link.parent.iterdir()) == [link]


def test_a_revoked_key_is_gone_and_the_others_stay(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tenant in ("a", "b"):
        add(file, capsys, "--tenant", tenant)
    first, second = read_keys(file).keys
    assert main(["keys", "revoke", "--keys", str(file), first.id]) == 0
    assert read_keys(file).keys == (second,)
    assert main(["keys", "revoke", first.id, "--keys", str(file)]) == 2
    assert f"there is no key {first.id}; there are {second.id}" in capsys.readouterr().err


def test_the_list_shows_everything_but_the_hash(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(file, capsys, "--tenant", "acme", "--scope", "join")
    (entry,) = read_keys(file).keys
    assert main(["keys", "list", "--keys", str(file)]) == 0
    shown = capsys.readouterr().out
    assert entry.id in shown
    assert "acme" in shown
    assert "join" in shown
    assert entry.sha256 not in shown


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["add"], "needs --tenant NAME"),
        (["add", "--tenant", "a b"], "tenant is 'a b', but must have"),
        (["add", "--tenant", "a", "--streams-max", "0"], "limits.streams_max is 0"),
        (["add", "id", "--tenant", "a"], "the other actions take none"),
        (["revoke"], "needs the ids of keys"),
        (["list"], "No such file"),
        (
            ["list", "--tenant", "a", "--streams-max", "1"],
            "keys list makes no key, so leave out --tenant, --streams-max",
        ),
        (["revoke", "id", "--scope", "admin"], "keys revoke makes no key, so leave out --scope"),
    ],
)
def test_wrong_arguments_change_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    assert main(["keys", *flags, "--keys", str(file)]) == 2
    assert problem in capsys.readouterr().err
    assert not file.exists()


def test_keys_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "from-environment")
    monkeypatch.setenv("BATON_ADMIN_KEY", "root")
    monkeypatch.setenv("BATON_JOIN_KEY", "host")
    http = configured().http
    assert (http.api_keys, http.admin_key, http.join_key) == (("from-environment",), "root", "host")
    assert not [name for name in os.environ if name.startswith("BATON_")], "child processes would inherit them"
    path = tmp_path / "api-keys"
    path.write_text("# of the team\none\n\ntwo\n")
    path.chmod(0o600)
    assert configured("--api-key-file", str(path)).http.api_keys == ("one", "two")
    assert configured("--api-key", "zero", "--api-key-file", str(path)).http.api_keys == ("zero", "one", "two")


def test_an_empty_file_of_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "api-keys"
    path.touch(0o600)
    with pytest.raises(ConfigError, match="it has no key"):
        configured("--api-key-file", str(path))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "myhost"])
def test_an_address_of_a_network_needs_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=r"other machines reach this server, but it has no keys.*--insecure"):
        configured("--host", host)
    assert configured("--host", host, "--api-key", "k").http.host == host
    assert configured("--host", host, "--insecure").http.host == host


def test_an_admin_key_does_not_protect_generation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no keys"):
        configured("--host", "0.0.0.0", "--admin-key", "root")


@pytest.mark.parametrize("flag", ["--allowed-host", "--cors-origin"])
def test_every_web_page_may_use_a_server_with_keys_only(flag: str) -> None:
    with pytest.raises(ConfigError, match="every web page may use this server"):
        configured(flag, "*")
    assert configured(flag, "*", "--api-key", "k")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert configured("--host", host).http.host == host


def test_two_equal_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="are the same"):
        configured("--api-key", "k", "--admin-key", "k")


def test_an_admin_port_of_a_network_needs_an_admin_key_and_its_own_number() -> None:
    with pytest.raises(ConfigError, match="give it --admin-key"):
        configured("--admin-port", "9000", "--admin-host", "10.0.0.1")
    with pytest.raises(ConfigError, match="a port of their own"):
        configured("--admin-port", "8000")
    with pytest.raises(ConfigError, match="give them --admin-port"):
        configured("--host", "0.0.0.0", "--api-key", "k", "--admin-host", "127.0.0.1")
    http = configured("--admin-port", "9000").http
    assert (http.admin_host, http.admin_port) == ("127.0.0.1", 9000)
