"""A file that is wrong is named on every line of what is said, whatever it was read for."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.files import form_of, in_file, keys_of, placed


def test_every_line_of_an_error_has_the_place() -> None:
    assert placed("tiers[1]", ConfigError("a is 3\nb is 4")) == ["tiers[1]: a is 3", "tiers[1]: b is 4"]


def test_what_is_raised_in_a_file_names_it_on_every_line() -> None:
    with pytest.raises(ConfigError) as caught, in_file("x.toml", "the cluster"):
        raise ConfigError("a is 3\nb is 4")
    assert str(caught.value) == "x.toml: a is 3\nx.toml: b is 4"


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for content, why in ((None, "No such file or directory"), (b"\xff\xfe", "'utf-8' codec can't decode")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as caught, in_file(path, "the cluster"):
            path.read_text(encoding="utf-8")
        assert str(caught.value).startswith(f"{path}: cannot read the cluster: {why}")


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "n = 1e1"), ("a.yaml", "n: 10.0"), ("a.yml", "n: 10.0"), ("a.json", '{"n": 1e1}')]
)
def test_the_name_says_how_it_is_written(name: str, text: str) -> None:
    assert keys_of(text, form_of(Path(name)), example="n = 1") == {"n": 10.0}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2]", "it must be keys with values, such as n = 1, but is a list"),
        ("", "it must be keys with values, such as n = 1, but is empty"),
        ("some words", "it must be keys with values, such as n = 1, but is a single value"),
        ("a: b: c", "not a YAML file: "),
    ],
)
def test_what_is_no_keys_is_told(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(text, "yaml", example="n = 1")
    assert str(caught.value).startswith(why)
