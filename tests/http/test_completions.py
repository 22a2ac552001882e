"""The shape of completions and chats, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def complete(client: httpx.Client, **fields: object) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def chat(client: httpx.Client, **fields: object) -> dict[str, Any]:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    response = client.post(path, json=body | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_a_completion_has_openais_shape_and_its_timings(client: httpx.Client) -> None:
    answer = complete(client, **GREEDY)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "hash"
    assert [(c["index"], len(c["text"]), c["finish_reason"], c["logprobs"]) for c in answer["choices"]] == [
        (0, 12, "length", None)
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    expected = "queue_s prefill_s handoff_s first_decode_s ttft_s tpot_s e2e_s cached_tokens prefill_worker"
    assert set(answer["timings"]) == {*expected.split(), "decode_worker", "attempts"}
    assert 0 <= answer["timings"]["ttft_s"] <= answer["timings"]["e2e_s"]


def test_greedy_and_seeded_text_repeat(client: httpx.Client) -> None:
    assert texts(complete(client, **GREEDY)) == texts(complete(client, **GREEDY))
    seeded = GREEDY | {"temperature": 1, "seed": 7}
    assert texts(complete(client, **seeded)) == texts(complete(client, **seeded))
    assert texts(complete(client, **seeded)) != texts(complete(client, **(seeded | {"seed": 8})))


def test_without_a_seed_the_text_differs(client: httpx.Client) -> None:
    unseeded = GREEDY | {"temperature": 1}
    assert texts(complete(client, **unseeded)) != texts(complete(client, **unseeded))


def test_text_and_its_token_ids_are_the_same_prompt(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert texts(complete(client, **(GREEDY | {"prompt": ids}))) == texts(complete(client, **GREEDY))
    assert texts(complete(client, **(GREEDY | {"prompt": [ids]}))) == texts(complete(client, **GREEDY))


def test_many_prompts_with_n_give_choices_in_order(client: httpx.Client) -> None:
    """Choice j of prompt i has index i * n + j, and is what the prompt gives alone with the same seed."""
    fields = GREEDY | {"temperature": 1, "seed": 3, "n": 2}
    together = complete(client, **(fields | {"prompt": ["one", "two"]}))
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    alone = [text for prompt in ("one", "two") for text in texts(complete(client, **(fields | {"prompt": prompt})))]
    assert texts(together) == alone
    assert len(set(alone)) == 4
    assert together["usage"]["prompt_tokens"] == 6
    assert together["usage"]["completion_tokens"] == 48


def test_choice_0_is_what_n_1_gives(client: httpx.Client) -> None:
    fields = GREEDY | {"temperature": 1, "seed": 3}
    assert texts(complete(client, **(fields | {"n": 3})))[0] == texts(complete(client, **fields))[0]


def test_sixteen_tokens_are_the_default_of_a_completion(client: httpx.Client) -> None:
    assert complete(client, prompt="hello", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_a_chat_goes_on_to_its_end(client: httpx.Client) -> None:
    answer = chat(client, temperature=0)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"content": choice["message"]["content"], "role": "assistant", "refusal": None}
    assert answer["usage"]["completion_tokens"] == len(choice["message"]["content"]) + 1


def test_a_stop_token_is_no_part_of_the_text(client: httpx.Client) -> None:
    whole = texts(complete(client, **GREEDY))[0]
    [stop] = client.post("/tokenize", json={"prompt": whole[4]}).json()["tokens"]
    answer = complete(client, **GREEDY, stop_token_ids=[stop])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert whole.startswith(answer["choices"][0]["text"])
    assert whole[4] not in answer["choices"][0]["text"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_ends_the_text_before_itself(client: httpx.Client, size: int) -> None:
    """Every token of the hash model is one character, so a longer stop string lies across tokens."""
    whole = texts(complete(client, **GREEDY))[0]
    stop = whole[4 : 4 + size]
    answer = complete(client, **GREEDY, stop=["never in it", stop])
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    streamed = events(client, COMPLETIONS, GREEDY | {"stop": stop})
    assert "".join(c["choices"][0]["text"] for c in streamed) == whole[: whole.index(stop)]


def test_stop_strings_wait_for_min_tokens(client: httpx.Client) -> None:
    whole = texts(complete(client, **GREEDY))[0]
    answer = complete(client, **GREEDY, stop=whole[0], min_tokens=12)
    assert len(answer["choices"][0]["text"]) >= 11


def test_max_tokens_wins_over_a_larger_min_tokens(client: httpx.Client) -> None:
    assert complete(client, prompt="hello", max_tokens=3, min_tokens=9)["usage"]["completion_tokens"] == 3


def test_a_whole_number_may_be_written_as_a_fraction(client: httpx.Client) -> None:
    """JSON has one kind of number: 3.0 is 3."""
    assert complete(client, prompt=[5.0, 6], max_tokens=3.0, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_echo_shows_the_prompt_first(client: httpx.Client) -> None:
    whole = texts(complete(client, **GREEDY))[0]
    assert texts(complete(client, **GREEDY, echo=True)) == ["hello" + whole]
    assert (
        "".join(c["choices"][0]["text"] for c in events(client, COMPLETIONS, GREEDY | {"echo": True}))
        == "hello" + whole
    )


def test_echo_with_logprobs_scores_the_prompt(client: httpx.Client) -> None:
    """max_tokens 0 gives the prompt and nothing else; its first token has no log probability."""
    answer = complete(client, prompt="hello", max_tokens=0, echo=True, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    [choice] = answer["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("hello")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) >= 1 for top in logprobs["top_logprobs"][1:])


def test_completion_logprobs_are_one_per_token_of_the_text(client: httpx.Client) -> None:
    fields = GREEDY | {"logprobs": 2, "echo": True}
    logprobs = complete(client, **fields)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == texts(complete(client, **fields))[0]
    assert logprobs["text_offset"] == list(range(17))
    streamed = [c["choices"][0]["logprobs"] for c in events(client, COMPLETIONS, fields)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in streamed if part for entry in part[name]] == logprobs[name]


def test_logprobs_end_where_a_stop_string_cuts(client: httpx.Client) -> None:
    whole = texts(complete(client, **GREEDY))[0]
    stop = whole[4:6]
    logprobs = complete(client, **GREEDY, stop=stop, logprobs=0)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole[: whole.index(stop)]
    assert logprobs["top_logprobs"] is None


def test_chat_logprobs_have_the_likeliest_tokens(client: httpx.Client) -> None:
    answer = chat(client, temperature=0, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=3)
    [choice] = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    plain = chat(client, temperature=0, max_tokens=4, ignore_eos=True, logprobs=True)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_stream_is_the_whole_answer_in_pieces(client: httpx.Client) -> None:
    whole = texts(complete(client, **GREEDY))[0]
    chunks = events(client, COMPLETIONS, GREEDY)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["timings"]["e2e_s"] > 0
    assert all("usage" not in chunk for chunk in chunks)


def test_include_usage_adds_a_last_chunk_without_choices(client: httpx.Client) -> None:
    chunks = events(client, COMPLETIONS, GREEDY | {"stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == complete(client, **GREEDY)["usage"]
    assert chunks[-1]["timings"]["ttft_s"] > 0


def test_a_chat_stream_names_the_role_once_per_choice(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 1, "max_tokens": 6, "ignore_eos": True}
    chunks = events(client, CHAT, body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    whole = chat(client, **body)["choices"]
    for index in range(3):
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [delta["delta"].get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        text = "".join(delta["delta"].get("content", "") for delta in deltas)
        assert text == whole[index]["message"]["content"]
        assert deltas[-1]["finish_reason"] == "length"


def test_text_parts_and_the_developer_role_are_understood(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    either = chat(client, messages=[{"role": "developer", "content": parts}], temperature=0)
    other = chat(client, messages=[{"role": "system", "content": "hi"}], temperature=0)
    assert either["choices"] == other["choices"]


def test_a_long_prompt_is_prepared_in_a_thread_and_gives_the_same_text(client: httpx.Client) -> None:
    """A body over the bound takes the other way: spaces make it long without changing the request."""
    body = json.dumps(GREEDY).encode()
    response = client.post(COMPLETIONS, content=body + b" " * 20_000, headers={"content-type": "application/json"})
    assert response.json()["choices"] == complete(client, **GREEDY)["choices"]


def test_the_request_id_is_echoed_and_may_be_used_twice(client: httpx.Client) -> None:
    for _ in range(2):
        response = client.post(COMPLETIONS, json=GREEDY, headers={"x-request-id": "my-id.1:a_b"})
        assert response.headers["x-request-id"] == "my-id.1:a_b"
        assert response.json()["id"] == "cmpl-my-id.1:a_b"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a;b"])
def test_a_request_id_that_is_no_fit_for_a_log_is_replaced(client: httpx.Client, bad: str) -> None:
    made = client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
    assert made != bad
    assert len(made) == 32
