"""Hostile grammars with the limits of production, 24 at once: each fails its own request, and no worker ends."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.attack.conftest import RunningServer, unharmed
from tests.attack.refusals import check_refusal
from tests.unit.compute.test_sandbox import HOSTILE, chain

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

AT_ONCE = 24
RANDOM_GRAMMARS = 120
ANSWERS = {200, 400, 429}
"""429: the share of one client in the queue of grammars is full."""
SLOW = "((a{1000}){1000}){1000}"
"""Compiles at once, but each token mask takes long."""


def nested(rng: random.Random) -> str:
    """Return a schema of one kind of nesting, up to some thousand levels deep."""
    wrap = rng.choice(("properties", "items", "anyOf", "allOf", "prefixItems", "not"))
    before, after = {
        "properties": ('{"properties":{"a":', "}}"),
        "items": ('{"items":', "}"),
        "not": ('{"not":', "}"),
    }.get(wrap, (f'{{"{wrap}":[', "]}"))
    levels = rng.choice((50, 190, 1000, 4000))
    return before * levels + "{}" + after * levels


def repeated(rng: random.Random) -> str:
    """Return a regular expression of repetitions of repetitions, of many alternatives, or of look-alikes of both."""
    inner = rng.choice(("a", "[a-z]", "a?", "(a|ab)", "\\w", ".", "(?:x+x+)+y", "\\p{L}"))
    for _ in range(rng.randint(1, 4)):
        inner = f"({inner}){rng.choice(('*', '+', '?', '{1000}', '{0,3000}', '{2,}', '{99999999}'))}"
    return rng.choice((inner, "|".join([inner] * 300), inner * 200, f"(?={inner})", f"{inner}\\1"))


def rules(rng: random.Random) -> str:
    """Return a Lark grammar of a long chain, of a cycle, of exponential ambiguity, or of a huge terminal."""
    links = rng.choice((10, 500, 3000))
    return rng.choice(
        (
            "".join(f"r{link}: r{link + 1}\n" for link in range(links)) + f'r{links}: "a"\nstart: r0\n',
            'start: start start | start start start | "a"\n',
            "start: a\na: b\nb: a\n",
            "start: A\n" + "A: " + '"b"? ' * links + "\n",
            "".join(f'r{link}: r{link + 1} r{link + 1} | "a"\n' for link in range(30)) + 'r30: "b"\nstart: r0\n',
        )
    )


def hostile(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a request with a grammar, in any of the fields that take one."""
    kind = rng.choice(("schema", "refs", "regex", "lark"))
    if kind == "regex":
        text = repeated(rng)
        return rng.choice(({"guided_regex": text}, {"structured_outputs": {"regex": text}}))
    if kind == "lark":
        text = rules(rng)
        return rng.choice(({"guided_grammar": text}, {"structured_outputs": {"grammar": text}}))
    text = nested(rng) if kind == "schema" else chain(rng.choice((100, 1800, 4000)), rng.choice(("", "anyOf")))
    if kind == "refs" and rng.random() < 0.5:
        tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(text)}}
        return {"tools": [tool], "tool_choice": "required"}
    return rng.choice(({"guided_json": text}, {"structured_outputs": {"json": text}}))


def bodies() -> list[dict[str, Any]]:
    """Return the grammars that have ended a server, the random ones, and the slow mask three times before and after."""
    rng = random.Random("grammars")
    known = [
        {"structured_outputs": {"json" if grammar.kind == "json_schema" else grammar.kind: grammar.text}}
        for grammar, _ in HOSTILE.values()
    ]
    slow = [{"structured_outputs": {"regex": SLOW}, "seed": seed} for seed in range(3)]
    return [*slow, *known, *(hostile(rng) for _ in range(RANDOM_GRAMMARS)), *slow]


def test_hostile_grammars(target: RunningServer, control: RunningServer) -> None:
    def ask(fields: dict[str, Any]) -> httpx.Response:
        with target.client(timeout_s=600) as client:
            messages = [{"role": "user", "content": "hi"}]
            return client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **fields})

    sent = bodies()
    with unharmed(target, control), ThreadPoolExecutor(AT_ONCE) as threads:
        for fields, answer in zip(sent, threads.map(ask, sent), strict=True):
            assert answer.status_code in ANSWERS, f"{answer.status_code}: {answer.text}; sent {str(fields)[:500]}"
            if answer.status_code != 200:
                check_refusal(answer.status_code, answer.content)
                error = answer.json()["error"]
                assert error["param"] or error["code"], error
        assert ask({"guided_regex": "[a-f]{4}"}).json()["choices"][0]["message"]["content"]
