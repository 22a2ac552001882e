"""Prompts that cannot fit are refused by their length, before they take the memory of a tokenizer."""

from __future__ import annotations

import pytest

from baton.compute.hash_engine import hash_card
from baton.compute.models.chat_template import PlainTemplate
from baton.compute.models.tokenizer import ByteTokenizer
from baton.core.errors import RequestError
from baton.core.limits import LimitsConfig
from baton.core.types import Sampling
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import RequestContext
from baton.serve.http.identity import NO_LIMITS, Identity
from baton.serve.http.prompts import Prompt, RequestMaker, TextEncoder, chat_prompt, completion_prompts
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.schemas import ChatRequest, CompletionRequest, SloFields


class Watched(ByteTokenizer):
    """Remembers the lengths of the texts that it has tokenized."""

    def __init__(self, token_chars_max: int | None) -> None:
        self.token_chars_max = token_chars_max
        self.lengths: list[int] = []

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text, add_special=add_special)


def texts(token_chars_max: int | None = 3) -> tuple[TextEncoder, Watched]:
    watched = Watched(token_chars_max)
    return TextEncoder(watched, request_tokens_max=10, vocab_tokens=watched.vocab_tokens), watched


def test_a_text_that_may_fit_is_tokenized() -> None:
    encoder, watched = texts()
    assert len(encoder.encode("a" * 30, "prompt", add_special=True)) == 30
    assert watched.lengths == [30]


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    encoder, watched = texts()
    limits = r"31 characters, and a token has at most 3, at most 9 tokens fit.*context_tokens.*kv\.bytes.*shorten"
    with pytest.raises(RequestError, match=limits) as refused:
        encoder.encode("a" * 31, "prompt", add_special=True)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "prompt", "context_length_exceeded")
    assert watched.lengths == []


def test_without_a_bound_every_text_is_tokenized() -> None:
    encoder, watched = texts(None)
    encoder.encode("a" * 1000, "prompt", add_special=True)
    assert watched.lengths == [1000]


def test_every_prompt_of_a_completion_and_every_chat_is_checked() -> None:
    encoder, watched = texts()
    with pytest.raises(RequestError, match="1000 characters"):
        completion_prompts(convert({"prompt": ["a", "b" * 1000]}, CompletionRequest), encoder, hash_card())
    body = convert({"messages": [{"role": "user", "content": "c" * 1000}]}, ChatRequest)
    with pytest.raises(RequestError, match=r"10\d\d characters") as refused:
        chat_prompt(body, encoder, PlainTemplate())
    assert refused.value.param == "messages"
    assert watched.lengths == [1]


@pytest.mark.parametrize(("user", "tenant"), [("ann", "ann"), ("u" * 128, "u" * 128)])
def test_the_field_user_names_the_tenant_of_a_server_without_keys(user: str, tenant: str) -> None:
    assert maker(user).make(0, Prompt([5], None), Sampling(), 9).tenant == tenant


def test_a_long_user_is_shortened_to_a_digest() -> None:
    """Histories, metrics and logs keep the names of tenants: a client must not fill them with megabytes."""
    tenants = {maker(user).make(0, Prompt([5], None), Sampling(), 9).tenant for user in ("u" * 10**6, "v" * 10**6)}
    assert len(tenants) == 2
    assert all(len(tenant) == 32 for tenant in tenants)


def maker(user: str) -> RequestMaker:
    budget = Budgets(LimitsConfig()).begin("me", NO_LIMITS, is_counted=False, now_s=0.0)
    context = RequestContext("r", 0.0, Identity(), "me", budget, SloFields(), "/v1/completions", {})
    return RequestMaker(context, CompletionRequest(prompt="a", user=user), 0)
