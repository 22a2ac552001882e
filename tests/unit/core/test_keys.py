"""Key files: their entries, and the permissions of files with secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.core.keys import digest_of, parse_keys, read_keys, read_secret


def entry(**given: Any) -> dict[str, Any]:
    return {"id": "a1", "sha256": digest_of(b"secret"), "tenant": "acme", **given}


def problems_of(*entries: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_keys(json.dumps({"keys": entries}))
    return str(caught.value).splitlines()


def test_an_entry_may_generate_unless_it_says_more() -> None:
    (key,) = parse_keys(json.dumps({"keys": [entry(limits={"streams_max": 3})]})).keys
    assert (key.scopes, key.limits.streams_max, key.limits.tokens_per_minute) == (("generate",), 3, None)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"scopes": ["root"]}, "keys[0].scopes[0] is 'root', but must be one of 'generate', 'admin', 'join'"),
        ({"scopes": []}, "keys[0].scopes is empty"),
        ({"sha256": "secret"}, "keys[0].sha256 must have 64 hexadecimal digits"),
        ({"tenant": "a b"}, "keys[0].tenant is 'a b', but must have 1 to 64 letters"),
        ({"id": ""}, "keys[0].id is '', but must have 1 to 64 letters"),
        ({"limits": {"streams_max": 0}}, "keys[0].limits.streams_max is 0, but must be between 1"),
        ({"limits": {"stream_max": 1}}, "unknown key keys[0].limits.stream_max (did you mean 'streams_max'?)"),
    ],
)
def test_a_wrong_entry_is_named_with_its_place(given: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(entry(**given))
    assert found.startswith(problem)


def test_one_key_with_two_entries_is_refused() -> None:
    """Its rights would depend on the order of the entries."""
    (found,) = problems_of(entry(), entry(id="a2", scopes=["admin"]))
    assert found.startswith("2 keys have the sha256 ")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"its mode is 0{mode:o}.*chmod 600"):
        read_keys(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_file_of_the_owner_and_its_group_is_read(tmp_path: Path, mode: int) -> None:
    """Containers often get secrets that their group can read."""
    path = tmp_path / "secret"
    path.write_text("text")
    path.chmod(mode)
    assert read_secret(path) == "text"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot read the key file: No such file"):
        read_keys(tmp_path / "none.json")
