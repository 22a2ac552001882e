"""Bodies of 4 MB that are odd in many ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

SIZE_BYTES = 3_900_000
"""Just below `http.body_bytes_max`."""
BRACKETS = 190_000
"""Just below the number that is allowed."""
AT_ONCE = 2
"""Clients that send each body at the same time."""
TYPE = {"content-type": "application/json"}
MAIN_FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/embeddings": "input",
    "/tokenize": "messages",
    "/detokenize": "tokens",
}
"""The field with the prompt of each route that takes large bodies."""
FIELD_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
"""The routes whose other fields are attacked too."""
MESSAGE = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def filled(part: str, between: str = ",", *, brackets: int = 0) -> str:
    """Return as many repetitions of a part as fit into a body, and into the limit of brackets if the part has some."""
    count = SIZE_BYTES // (len(part) + len(between))
    return between.join([part] * (min(count, BRACKETS // brackets) if brackets else count))


def dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def keys(name: str) -> str:
    """Return an object with as many different names as fit into a body."""
    return "{" + ",".join(f'"{name}{number}":1' for number in range(SIZE_BYTES // (len(name) + 12))) + "}"


def values() -> Iterator[tuple[str, str]]:
    """Yield values of 4 MB for any field, with a name for each."""
    yield "text", f'"{"a" * SIZE_BYTES}"'
    yield "escapes", f'"{filled(chr(92) + "u20ac", "")}"'
    yield "quotes", f'"{filled(chr(92) + chr(34), "")}"'
    yield "integers", f"[{filled('7')}]"
    yield "whole numbers", f"[{filled('7.0')}]"
    yield "large numbers", f"[{filled('18446744073709551615')}]"
    yield "texts", f"[{filled(chr(34) * 2)}]"
    yield "lists", f"[{filled('[]', brackets=1)}]"
    yield "lists of numbers", f"[{filled('[1.0]', brackets=1)}]"
    yield "objects", f"[{filled('{}', brackets=1)}]"
    yield "deep lists", f"[{filled('[' * 200 + ']' * 200, brackets=200)}]"
    yield "names", keys("k")
    yield "brackets", f"[{filled('[]')}]"
    yield "unfinished", "[" + filled("[1]")


def messages() -> Iterator[tuple[str, str]]:
    """Yield lists of messages, blocks and calls of 4 MB, with a name for each."""
    plain = dump(MESSAGE)
    yield "messages", f"[{filled(plain, brackets=1)}]"
    yield "an odd message", f"[{filled(plain, brackets=1)},{dump({**MESSAGE, 'odd': 1})}]"
    yield "odd messages", f"[{filled(dump({**MESSAGE, 'odd': 1}), brackets=1)}]"
    yield "a wrong message", f"[{filled(plain, brackets=1)},{dump({**MESSAGE, 'content': 7})}]"
    for name, kind in (("parts", "text"), ("blocks", "input_text")):
        part = dump({"type": kind, "text": "a"})
        yield name, f'[{{"role":"user","content":[{filled(part, brackets=1)}]}}]'
    yield "calls between messages", f"[{filled(f'{dump(CALL)},{plain}', brackets=2)}]"


def fields() -> Iterator[tuple[str, str]]:
    """Yield bodies without their first bracket and their prompt, for the routes that generate text."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tool = dump({"type": "function", "function": function})
    schema = {"enum": [f"v{number}" for number in range(SIZE_BYTES // 12)]}
    yield "unknown fields", keys("k")[1:]
    yield "a long name", f'"{"k" * SIZE_BYTES}":1}}'
    yield "a nested unknown field", f'"k":[{filled("[" * 100 + "]" * 100, brackets=100)}]}}'
    yield "tools", f'"tools":[{filled(tool, brackets=4)}]}}'
    yield "stop strings", f'"stop":[{filled(dump("a"))}]}}'
    yield "a long stop string", f'"stop":"{"a" * SIZE_BYTES}"}}'
    yield "biases", f'"logit_bias":{keys("")}}}'
    yield "metadata", f'"metadata":{keys("m")}}}'
    yield (
        "a large schema",
        dump({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}})[1:],
    )
    yield (
        "a large tool",
        dump(
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
                "tool_choice": "required",
            }
        )[1:],
    )
    yield "a long model", f'"model":"{"m" * SIZE_BYTES}"}}'
    yield "a long salt", f'"cache_salt":"{"s" * SIZE_BYTES}"}}'


def bodies(path: str) -> Iterator[tuple[str, str]]:
    """Yield the large bodies for a route, with a name for each."""
    main = MAIN_FIELDS[path]
    short = ',"max_tokens":1' if path in ("/v1/completions", "/v1/chat/completions", "/v1/messages") else ""
    lists = values() if main in ("prompt", "tokens") else (*values(), *messages())
    for name, value in lists:
        yield name, f'{{"{main}":{value}{short}}}'
    prompt = {"messages": [MESSAGE], "tokens": [5]}.get(main, "a")
    for name, rest in fields() if path in FIELD_ROUTES else ():
        yield name, f'{{"{main}":{dump(prompt)}{short},{rest}'
    yield "only text", f'"{"a" * SIZE_BYTES}"'
    yield "no JSON", "{" * SIZE_BYTES


def send_by_all(url: str, content: bytes, headers: dict[str, str]) -> list[httpx.Response]:
    """Send a body by several clients at once."""

    def post(_: int) -> httpx.Response:
        return httpx.post(url, content=content, headers=headers, timeout=120)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return [*threads.map(post, range(AT_ONCE))]
