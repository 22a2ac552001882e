"""Plug-ins around requests: they run in order, and one that fails takes only its own request down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import HooksConfig, Plugin
from baton.core.errors import ConfigError, RequestError
from baton.serve.live.hooks import Hooks, load_hooks
from examples.hooks.redact import RedactEmail
from examples.hooks.system_prompt import SystemPrompt

CHAT = "/v1/chat/completions"


class Shout:
    """Upper case, and a mark at the end."""

    def begin(self, body: Mapping[str, Any], route: str) -> Shout:
        return self

    def push(self, text: str) -> str:
        return text.upper()

    def flush(self) -> str:
        return "!"


class Broken:
    """Fails at everything."""

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        raise ZeroDivisionError

    def begin(self, body: Mapping[str, Any], route: str) -> Broken:
        return self

    def push(self, text: str) -> str:
        raise KeyError(text)

    def flush(self) -> str:
        return ""


class Strict:
    """Refuses with a status of its own."""

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        raise RequestError("no questions after six", status=403)


def test_the_system_prompt_comes_first() -> None:
    hooks = Hooks(request=(SystemPrompt("Be brief."),))
    body = hooks.before({"messages": [{"role": "user", "content": "hi"}]}, CHAT)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert hooks.before({"prompt": "hi"}, "/v1/completions") == {"prompt": "hi"}
    assert hooks.before({"messages": 5}, CHAT) == {"messages": 5}


@given(pieces=st.lists(st.text("ab@. x-", max_size=5), max_size=12))
def test_redaction_does_not_depend_on_how_the_text_is_cut(pieces: list[str]) -> None:
    def redacted(parts: list[str]) -> str:
        chain = Hooks(output=(RedactEmail(),)).begin({}, CHAT)
        return "".join([chain.push(part) for part in parts]) + chain.flush()

    assert redacted(pieces) == redacted(["".join(pieces)])


def test_an_address_over_three_pieces_is_masked() -> None:
    chain = Hooks(output=(RedactEmail("<x>"),)).begin({}, CHAT)
    assert [chain.push("ask al"), chain.push("ice@exam"), chain.push("ple.com or"), chain.flush()] == [
        "ask ",
        "",
        "<x> ",
        "or",
    ]


def test_what_one_filter_keeps_goes_through_the_next_at_the_end() -> None:
    chain = Hooks(output=(RedactEmail(), Shout())).begin({}, CHAT)
    assert chain.push("hello") == ""
    assert chain.flush() == "HELLO!"


def test_a_hook_that_raises_is_a_500_of_this_request(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks(request=(Broken(),), output=(Broken(),))
    with pytest.raises(RequestError, match="Broken failed: ZeroDivisionError") as refused:
        hooks.before({}, CHAT)
    assert refused.value.status == 500
    with pytest.raises(RequestError, match="Broken failed: KeyError"):
        hooks.begin({}, CHAT).push("a")
    assert "ZeroDivisionError" in caplog.text


def test_a_hook_may_refuse_with_its_own_status() -> None:
    with pytest.raises(RequestError, match="no questions after six") as refused:
        Hooks(request=(Strict(),)).before({}, CHAT)
    assert refused.value.status == 403


def test_hooks_are_loaded_from_the_configuration() -> None:
    config = HooksConfig(
        request=(Plugin(use="examples.hooks.system_prompt:SystemPrompt", options={"text": "Be brief."}),),
        output=(Plugin(use="examples.hooks.redact:RedactEmail"),),
    )
    assert load_hooks(config) == Hooks(request=(SystemPrompt("Be brief."),), output=(RedactEmail(),))


def test_a_hook_of_the_wrong_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="RedactEmail is no RequestHook: it lacks before"):
        load_hooks(HooksConfig(request=(Plugin(use="examples.hooks.redact:RedactEmail"),)))
