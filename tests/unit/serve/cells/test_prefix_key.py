"""Keys of requests: equal for the turns of a conversation of one tenant, and for nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.serve.cells.prefix_key import MESSAGES_MAX, PREFIX_BYTES, prefix_key

SYSTEM, HELLO = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}
LATER = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"}]
ALICE = {b"authorization": b"Bearer alice"}


def key(body: dict[str, Any], headers: dict[bytes, bytes] = ALICE) -> int:
    return prefix_key(headers, json.dumps(body).encode())


@pytest.mark.parametrize("field", ["messages", "input"])
def test_turns_of_a_conversation_have_one_key(field: str) -> None:
    first = key({"model": "m", field: [SYSTEM, HELLO]})
    assert key({"temperature": 0, field: [SYSTEM, HELLO, *LATER], "model": "m"}) == first
    others = [
        key({"model": "m", field: [SYSTEM, {"role": "user", "content": "Bye"}]}),
        key({"model": "m", field: [HELLO]}),
        key({"model": "n", field: [SYSTEM, HELLO]}),
        key({"model": "m", field: [SYSTEM, HELLO], "cache_salt": "s"}),
        key({"model": "m", field: [SYSTEM, HELLO], "system": "Rhyme."}),
        key({"model": "m", field: [SYSTEM, HELLO]}, {b"authorization": b"Bearer bob"}),
        key({"model": "m", field: [SYSTEM, HELLO]}, {b"x-api-key": b"alice"}),
    ]
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_other_prompts_count_by_their_beginning(field: str) -> None:
    long = "x" * PREFIX_BYTES
    assert key({field: long}) == key({field: long + " and more"})
    assert key({field: "a"}) != key({field: "b"})


def test_a_user_is_searched_in_the_first_messages_only() -> None:
    opening = [SYSTEM] * (MESSAGES_MAX - 1)
    assert key({"messages": [*opening, HELLO, *LATER]}) == key({"messages": [*opening, HELLO]})
    assert key({"messages": [*opening, SYSTEM, HELLO]}) == key({"messages": [*opening, SYSTEM, *LATER]})


DEEP = b"[" * 100_000


@pytest.mark.parametrize("body", [DEEP, b'{"messages": ' + DEEP, b'{"messages": [' + DEEP + b"]" * 100_000 + b"]}"])
def test_a_deep_body_has_a_key_too(body: bytes) -> None:
    assert prefix_key({}, body) == prefix_key({}, body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 1}', b'{"messages": [1]}', b'{"input": ["a", "b"]}'])
def test_a_body_that_a_cell_will_refuse_has_a_key_too(body: bytes) -> None:
    assert prefix_key({}, body) == prefix_key({}, body)
