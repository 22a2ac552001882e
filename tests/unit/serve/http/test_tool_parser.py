"""Tool calls in a streamed text: found however it is cut, and what is no call is given back to the last character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.serve.http.tools.formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from baton.serve.http.tools.parser import ToolParser, call_id

FORMATS = (HERMES, MISTRAL, LLAMA3)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "a\\qb", "arguments": {"x": 1}}',
        '{"name": "a\nb", "arguments": {"x": 1}}',
        '{"name": "\\u12", "arguments": {"x": 1}}',
        '{"name": "\\ud800", "arguments": {"x": 1}}',
        '{"arguments": {"x": "\\ud800"}, "name": "f"}',
        '{"arguments": {"x": NaN}, "name": "f"}',
        '{"arguments": {"x": ' + "[" * 5000 + "]" * 5000 + '}, "name": "f"}',
    ],
)
def test_what_is_no_json_is_text_and_no_crash(call: str) -> None:
    """A model writes what it likes: names with half an escape, half a character, a depth that nobody decodes."""
    assert _read(HERMES, [f"<tool_call>{call}"]) == (f"<tool_call>{call}", [])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_white_space_without_end_is_kept_back_and_given_back(form: ToolFormat) -> None:
    """A small model writes it in a loop. Whoever reads what is kept back anew for each blank needs hours for this."""
    blanks = " \n" * 500_000
    assert _read(form, [f"a{blanks}b{blanks}"]) == (f"a{blanks}b{blanks}", [])


def _read(form: ToolFormat, pieces: list[str], calls_max: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Return the text that is no call, and name and arguments of every call."""
    parser = ToolParser(form, name="answer", calls_max=calls_max)
    text, calls, ids = "", [], []
    for parsed in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        text += parsed.text
        for part in parsed.parts:
            if part.name is not None:
                assert part.index == len(calls)
                calls.append((part.name, ""))
                ids.append(part.id)
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.arguments)
    assert len(set(ids)) == len(calls) == parser.calls
    return text, calls


@pytest.mark.parametrize(
    ("form", "text", "rest", "calls"),
    [
        (
            HERMES,
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"", "b": [1, {}]}}\n'
            "</tool_call>\n"
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
            "Let me see.",
            [("f", '{"a": "}</tool_call>\\"", "b": [1, {}]}'), ("g", "{}")],
        ),
        (HERMES, '<<tool_call>{"name": "f", "arguments": {}}</tool_call> then', "< then", [("f", "{}")]),
        (HERMES, '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, "<tool_call>no</tool_call> a < b", "<tool_call>no</tool_call> a < b", []),
        (HERMES, '<tool_call>{"nme": "f"}</tool_call>!', '<tool_call>{"nme": "f"}</tool_call>!', []),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": 1', '<tool_call>{"name": "f", "arguments": 1', []),
        (HERMES, "a\n\n <tool_cal", "a\n\n <tool_cal", []),
        (HERMES, " \n", " \n", []),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "f", "arguments": {"q": "[TOOL_CALLS]"}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", '{"q": "[TOOL_CALLS]"}'), ("g", "{}")],
        ),
        (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
        (LLAMA3, '\n{"name": "f", "parameters": {"q": "ü"}}', "", [("f", '{"q": "ü"}')]),
        (
            LLAMA3,
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (LLAMA3, '{"answer": {"x": 3}} ', '{"answer": {"x": 3}} ', []),
        (LLAMA3, 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
    ],
)
def test_calls_are_told_from_text_however_it_is_cut(
    form: ToolFormat, text: str, rest: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 5, len(text)):
        assert _read(form, [text[at : at + size] for at in range(0, len(text), size)]) == (rest, calls)


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<"]
HEADS = ['{"name": "f", "arguments": {"a": ', '{"name": "f", "parameters": {"a": ', '"x"}}']
fragments = st.sampled_from([*MARKS, *HEADS, *'{}[]"\\ \n,a:;'])


@given(form=st.sampled_from(FORMATS), parts=st.lists(fragments, max_size=20), data=st.data())
def test_no_cut_changes_what_is_read(form: ToolFormat, parts: list[str], data: st.DataObject) -> None:
    """And a text without a mark comes out as it went in."""
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = _read(form, [text])
    assert _read(form, pieces) == whole
    if not whole[1]:
        assert whole[0] == text


@settings(max_examples=30)
@given(
    calls=st.lists(
        st.tuples(
            st.text(min_size=1, max_size=9), st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9))
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_call_comes_through(calls: list[tuple[str, dict]]) -> None:
    text = "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in calls
    )
    rest, read = _read(HERMES, list(text))
    assert rest == ""
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls


def test_what_follows_the_last_wanted_call_is_dropped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>x'
    assert _read(HERMES, [text], calls_max=1) == ("", [("f", "{}")])
    parser = ToolParser(HERMES, name="answer", calls_max=1)
    end = text.index("}") + 1
    parser.push(text[: end - 1])
    assert not parser.is_full
    parser.push(text[end - 1 : end])
    assert parser.is_full


def test_arguments_stream_as_they_come() -> None:
    """The name comes with the first brace of the arguments, not with the end of the call."""
    parser = ToolParser(HERMES, name="answer")
    (part,) = parser.push('<tool_call>{"name": "f", "arguments": {').parts
    assert (part.index, part.name, part.arguments) == (0, "f", "{")
    (part,) = parser.push('"city": "P').parts
    assert (part.index, part.name, part.arguments) == (0, None, '"city": "P')


def test_ids_are_nine_letters_and_digits() -> None:
    """Mistral's templates refuse others."""
    made = {call_id(f"request-{number}") for number in range(500)}
    assert len(made) == 500
    assert all(len(name) == 9 and name.isalnum() for name in made)
