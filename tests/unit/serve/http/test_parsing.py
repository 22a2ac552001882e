"""Messages about bad bodies: the field, what it takes, what it got."""

from __future__ import annotations

import pytest

from baton.core.errors import RequestError
from baton.serve.http.wire.parsing import (
    UNKNOWN_FIELDS_MAX,
    WALKED_MAX,
    convert,
    parse_object,
    without_unknown_fields,
)
from baton.serve.http.wire.schemas import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"n": 1' + b"0" * 5000 + b"}", "out of range"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\udc00"}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deeply: at most 256 levels"),
        pytest.param(b"[" + b"[1]," * 200_000 + b"]", "200001 brackets, at most 200000 are allowed", id="brackets"),
        (b"[1]", "must be a JSON object, got [1]"),
        (b'{"prompt": "a"} x', "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused_in_words(raw: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says.replace("[", r"\[")) as refused:
        parse_object(raw)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 0}, "n", "n must be an integer from 1 to 128, got 0"),
        ({"n": True}, "n", "n must be an integer from 1 to 128, got true"),
        ({"temperature": -0.5}, "temperature", "temperature must be a number from 0 to 2, got -0.5"),
        ({"top_p": 0}, "top_p", "top_p must be a number above 0 and at most 1, got 0"),
        ({"stop": ["x", ""]}, "stop[1]", 'stop[1] must be text of 1 to 256 characters, got ""'),
        ({"temprature": 1}, "temprature", "unknown field \"temprature\" (did you mean 'temperature'?)"),
        (
            {"use_beam_search": True},
            "use_beam_search",
            "use_beam_search is not supported: Baton samples; it does not search beams",
        ),
        ({"suffix": "end"}, "suffix", 'suffix is not supported, got "end": Baton does not fill in the middle'),
        ({"stream_options": {"x": 1}}, "stream_options.x", "unknown field stream_options.x"),
    ],
)
def test_a_bad_field_is_named_with_its_range_and_its_value(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        convert({"prompt": "a", **fields}, CompletionRequest)
    assert (refused.value.param, str(refused.value)) == (param, message)


def test_an_integer_beyond_every_float_is_out_of_range() -> None:
    """400 digits do not fit into a float: that is a client's mistake, not ours."""
    with pytest.raises(RequestError, match="max_tokens must be an integer") as refused:
        convert({"prompt": "a", "max_tokens": int("1" * 400)}, CompletionRequest)
    assert refused.value.status == 400


def test_the_walk_for_a_wrong_part_is_bounded() -> None:
    """A wrong message behind `WALKED_MAX` right ones is told of the whole list, so no body holds up other requests."""
    messages = [{"role": "user", "content": "a"}] * WALKED_MAX
    with pytest.raises(RequestError) as near:
        convert({"messages": [*messages[:10], {"role": "user", "content": 7}]}, ChatRequest)
    with pytest.raises(RequestError) as far:
        convert({"messages": [*messages, {"role": "user", "content": 7}]}, ChatRequest)
    assert (near.value.param, far.value.param) == ("messages[10].content", "messages")


def test_a_long_value_is_cut_in_the_message() -> None:
    """A message never carries a megabyte back."""
    with pytest.raises(RequestError) as refused:
        convert({"prompt": "a", "user": ["x" * 1000]}, CompletionRequest)
    assert str(refused.value).endswith("... (1004 characters)")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("body", [{"x" * 10**6: 1}, {"stream_options": {"x" * 10**6: 1}}])
def test_a_long_name_is_cut_in_the_message(body: dict[str, object]) -> None:
    with pytest.raises(RequestError) as refused:
        convert({"prompt": "a", **body}, CompletionRequest)
    assert "... (1000" in str(refused.value)
    assert len(str(refused.value)) < 200
    assert len(refused.value.param or "") < 200


def test_unknown_fields_are_bounded() -> None:
    def ignored(count: int) -> list[str]:
        body = {"prompt": "a", **{f"x{number}": 1 for number in range(count)}}
        return without_unknown_fields(body, CompletionRequest)[1]

    assert len(ignored(UNKNOWN_FIELDS_MAX)) == UNKNOWN_FIELDS_MAX
    with pytest.raises(RequestError, match="more than 1000 unknown fields"):
        ignored(UNKNOWN_FIELDS_MAX + 1)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="prompt is required"):
        convert({}, CompletionRequest)
    with pytest.raises(RequestError, match=r"messages\[0\].content is required"):
        convert({"messages": [{"role": "user"}]}, ChatRequest)


def test_an_answer_may_be_sent_back_as_a_message() -> None:
    """What our own answers contain, and what OpenAI's client adds to it, is welcome in the next turn."""
    back = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    assert convert({"messages": [back]}, ChatRequest).messages[0].content == "hi"


def test_fields_that_change_no_answer_are_taken() -> None:
    convert({"messages": [{"role": "user", "content": "a"}], "store": True, "metadata": {"a": 1}}, ChatRequest)
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    convert({"messages": [{"role": "user", "content": "a"}], **neutral}, ChatRequest)


def test_a_body_of_the_deepest_nesting_is_walked() -> None:
    """Every field refuses it in words, by functions that recurse."""
    nested = b"[" * 255 + b"]" * 255
    for field in ("prompt", "stop", "user", "logit_bias", "structured_outputs"):
        with pytest.raises(RequestError, match=field):
            convert(parse_object(b'{"%s": %s}' % (field.encode(), nested)), CompletionRequest)
    many = b'{"prompt": [' + b",".join([b"[5]"] * 300) + b"]}"
    assert len(parse_object(many)["prompt"]) == 300
