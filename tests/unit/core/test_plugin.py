"""Loading plug-ins by name: every mistake is answered with what is wrong and what exists instead."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

from baton.core.errors import ConfigError
from baton.core.plugin import load_plugin, plugin_maker

HERE = __name__


@runtime_checkable
class Greeter(Protocol):
    def greet(self) -> str: ...


@dataclass
class Polite:
    name: str
    greeting: str = "Hello"

    def greet(self) -> str:
        return f"{self.greeting}, {self.name}"


class Silent:
    pass


class Picky:
    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError("size must be at least 1")


NOT_A_CLASS = 5


def test_a_class_is_made_with_its_options() -> None:
    assert load_plugin(f"{HERE}:Polite", {"name": "Ada"}, expects=Greeter).greet() == "Hello, Ada"


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("Polite", {}, "write your own as module:Class"),
        (":Polite", {}, "write your own as module:Class"),
        ("no_such_package.module:Polite", {}, "no module 'no_such_package'"),
        ("baton.policy.pressure:LeastPressure", {}, "write 'slo-headroom' instead"),
        ("baton.decide.policy.routing:EarliestFirstTokn", {}, "write 'earliest-first-token' instead"),
        (f"{HERE}:Politee", {}, "has no Politee \\(did you mean 'Polite'\\?\\)"),
        (f"{HERE}:NOT_A_CLASS", {}, "NOT_A_CLASS is no class"),
        ("cheapest-handoff", {"ill_s": 5.0}, "unknown option 'ill_s' \\(did you mean 'avoid_s'\\?\\)"),
        (f"{HERE}:Polite", {"nane": "Ada"}, "unknown option 'nane' \\(did you mean 'name'\\?\\)"),
        (f"{HERE}:Polite", {"nane": "Ada"}, "option 'name' is required"),
        (f"{HERE}:Silent", {}, "is no Greeter: it lacks greet"),
        (f"{HERE}:Picky", {"size": 0}, "size must be at least 1"),
    ],
)
def test_a_mistake_is_a_config_error_in_words(spec: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_plugin(spec, options, expects=Greeter)


def test_a_plugin_maker_reports_a_mistake_before_the_first_instance() -> None:
    make = plugin_maker(f"{HERE}:Polite", {"name": "Ann"}, expects=Greeter)
    one, other = make(), make()
    assert one is not other
    assert one.greet() == other.greet() == "Hello, Ann"
    with pytest.raises(ConfigError, match="unknown option 'nmae'"):
        plugin_maker(f"{HERE}:Polite", {"nmae": "Ann"}, expects=Greeter)
    with pytest.raises(ConfigError, match="size must be at least 1"):
        plugin_maker(f"{HERE}:Picky", {"size": 0}, expects=Greeter)()


def test_a_module_that_needs_a_missing_one_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's module is there; what it imports is not. The message must not say that the plug-in is missing."""
    (tmp_path / "needy_plugin.py").write_text("import something_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needy_plugin needs the module 'something_missing'"):
        load_plugin("needy_plugin:Anything", {}, expects=Greeter)
    assert "needy_plugin" not in sys.modules


def test_a_module_that_is_no_python_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text("class Mine:\n    def route(self\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"half_written cannot be imported: .*half_written.py, line 2"):
        load_plugin("half_written:Mine", {}, expects=Greeter)
