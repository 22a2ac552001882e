"""How a model is told about tools, and what its calls have to match: by its template, or in words."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from baton.compute.hash_engine import EOS_TOKEN, VOCAB_TOKENS
from baton.compute.models.grammar import grammar_problem, grammar_source, token_trie
from baton.compute.models.tokenizer import ByteTokenizer, StreamDecoder
from baton.compute.sandbox.work import JinjaTemplate
from baton.core.errors import RequestError
from baton.core.types import Grammar
from baton.serve.http.prompts import TextEncoder, chat_prompt
from baton.serve.http.tools.formats import DESCRIBED, HERMES, LLAMA3, MISTRAL, ToolFormat, format_of
from baton.serve.http.tools.use import arguments_schema, call_grammar, mark_token, tool_use
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.schemas import ChatRequest, FunctionSpec

TOKENIZER = ByteTokenizer()
TEXTS = TextEncoder(TOKENIZER, 4096, TOKENIZER.vocab_tokens)
WEATHER = FunctionSpec(
    name="weather",
    description="Tell the weather",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/place"}, "day": {"enum": ["today", "tomorrow"]}},
        "required": ["city", "day"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "maxLength": 8}},
    },
)
NOW = FunctionSpec(name="now")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tell the weather", "parameters": WEATHER.parameters},
    }
]
CALL = {"id": "call_1234", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is Rome?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1234", "content": "sunny"},
]
QWEN_LIKE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
)
MISTRAL_LIKE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.id }}:{{ call.function | tojson }}{% endfor %}"
    "{% if message.role == 'tool' %}{{ message.tool_call_id }}={{ message.content }}{% endif %}{% endfor %}"
)
PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"


def _rendered(template: str, **fields: object) -> str:
    body = convert({"messages": TALK, "tools": TOOLS, **fields}, ChatRequest)
    return chat_prompt(body, TEXTS, JinjaTemplate(template, {})).text or ""


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (PLAIN, DESCRIBED),
        ("", DESCRIBED),
        (QWEN_LIKE, HERMES),
        (MISTRAL_LIKE, MISTRAL),
        ('{{ tools }} {"name": function name, "parameters": dictionary} Environment: ipython', LLAMA3),
    ],
)
def test_the_template_tells_the_format(template: str, form: ToolFormat) -> None:
    assert format_of(template) is form


@pytest.mark.parametrize(
    "template", ["tools <|tool_call|>", "tools [TOOL_CALLS]f[ARGS]{}", "tools <tool_call><function=f>"]
)
def test_a_format_that_we_cannot_read_is_refused(template: str) -> None:
    with pytest.raises(RequestError, match="does not read") as refused:
        format_of(template)
    assert refused.value.param == "tools"


def test_templates_get_tools_and_arguments_as_objects() -> None:
    text = _rendered(QWEN_LIKE)
    first, *_ = text.splitlines()
    assert json.loads(first)["function"]["name"] == "weather"
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert text.endswith("[tool]sunny")


def test_mistral_gets_ids_that_its_template_takes_and_both_sides_alike() -> None:
    text = _rendered(MISTRAL_LIKE)
    made = text.split("[TOOL_CALLS]")[1].split(":")[0]
    assert len(made) == 9
    assert text.endswith(f"{made}=sunny")


def test_a_template_without_tools_is_told_in_words() -> None:
    """Signatures in the system message, calls and results as text: nothing of the conversation is lost."""
    text = _rendered(PLAIN)
    assert text.startswith("[system]Be brief.\n\n")
    assert '"name":"weather"' in text
    assert '[assistant]<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "[user]<tool_response>\nsunny\n</tool_response>" in text
    alone = chat_prompt(convert({"messages": TALK[1:2], "tools": TOOLS}, ChatRequest), TEXTS, JinjaTemplate(PLAIN, {}))
    assert (alone.text or "").startswith("[system]")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert "Tell the weather" not in _rendered(QWEN_LIKE, tool_choice="none")
    assert "Tell the weather" not in _rendered(PLAIN, tool_choice="none")


def _accepts(lark: str, text: str) -> bool:
    trie = token_trie(TOKENIZER, vocab_tokens=VOCAB_TOKENS, eos_token_ids=(EOS_TOKEN,))
    matcher = LLMatcher(trie, grammar_source(Grammar(kind="lark", text=lark)), log_level=0)
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


GOOD = '{"name": "weather", "%s": {"city": "Rome", "day": "today"}}'


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (HERMES, "<tool_call>\n" + GOOD % "arguments" + "\n</tool_call>", GOOD % "arguments"),
        (MISTRAL, "[TOOL_CALLS] [" + GOOD % "arguments" + "]", "[TOOL_CALLS] []"),
        (LLAMA3, GOOD % "parameters", GOOD % "arguments"),
    ],
)
def test_a_required_call_has_the_models_own_format(form: ToolFormat, good: str, bad: str) -> None:
    lark = call_grammar([WEATHER, NOW], form, TOKENIZER, many=False)
    assert grammar_problem(Grammar(kind="lark", text=lark)) == ""
    assert _accepts(lark, good)
    for wrong in (bad, good.replace("today", "someday"), good.replace("Rome", "Constantinople"), good + good):
        assert not _accepts(lark, wrong)
    assert _accepts(lark, good.replace(GOOD[20:].split("%s")[0], GOOD[20:].split("%s")[0]))


def test_several_calls_where_they_are_welcome() -> None:
    call = "<tool_call>\n" + GOOD % "arguments" + "\n</tool_call>"
    none = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    lark = call_grammar([WEATHER, NOW], HERMES, TOKENIZER, many=True)
    assert _accepts(lark, f"{call}\n{none}\n{call}")
    assert not _accepts(lark, "")


class _Marked(ByteTokenizer):
    """A vocabulary in which a mark is a special token."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [2] if text == "[TOOL_CALLS]" else super().encode(text, add_special=add_special)

    def token_bytes(self, token: int) -> bytes:
        return b"[TOOL_CALLS]" if token == 2 else super().token_bytes(token)


def test_a_mark_that_is_a_special_token_is_written_as_one_and_read_as_text() -> None:
    tokenizer = _Marked()
    assert mark_token("[TOOL_CALLS]", tokenizer) == 2
    assert mark_token("[TOOL_CALLS]", TOKENIZER) is None
    assert "<[2]>" in call_grammar([NOW], MISTRAL, tokenizer, many=False)
    assert StreamDecoder(tokenizer).push(2) == ""
    assert StreamDecoder(tokenizer, shown=frozenset((2,))).push(2) == "[TOOL_CALLS]"
    fields = convert({"messages": TALK[:2], "tools": TOOLS}, ChatRequest)
    use = tool_use(fields, MISTRAL_LIKE)
    assert use is not None
    assert use.shown_tokens(tokenizer) == {2}


def schema_of(parameters: dict[str, object]) -> dict[str, object]:
    return arguments_schema(FunctionSpec(name="f", parameters=parameters))


def test_arguments_have_no_properties_that_the_schema_does_not_name() -> None:
    """LangChain's tools do not say so, and its functions fail for invented arguments."""
    place = {"type": "object", "properties": {"city": {"type": "string"}}}
    places = {"type": "array", "items": place}
    found = schema_of(
        {"properties": {"to": place, "over": places, "by": {"$ref": "#/$defs/by"}}, "$defs": {"by": place}}
    )
    closed = {**place, "additionalProperties": False}
    assert found == {
        "type": "object",
        "properties": {"to": closed, "over": {"type": "array", "items": closed}, "by": {"$ref": "#/$defs/by"}},
        "$defs": {"by": closed},
        "additionalProperties": False,
    }
    assert schema_of({"properties": {}})["additionalProperties"] is False


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "object"}}, "additionalProperties": {"type": "number"}},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"type": "object", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    ],
    ids=["any object", "it says otherwise", "alternatives", "parts"],
)
def test_arguments_that_may_have_further_properties_stay_open(parameters: dict[str, object]) -> None:
    assert schema_of(parameters) == parameters


@pytest.mark.parametrize("arguments", ['{"a":' * 5000 + "1" + "}" * 5000, "[" * 5000, '{"a": "\\ud800"}', '{"a": NaN}'])
def test_hostile_arguments_of_a_call_stay_text(arguments: str) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    template = (
        "{# tools, <tool_call> #}{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert format_of(template) is HERMES
    texts = TextEncoder(TOKENIZER, 1 << 16, TOKENIZER.vocab_tokens)
    prompt = chat_prompt(convert({"messages": talk}, ChatRequest), texts, JinjaTemplate(template, {}))
    assert prompt.text == arguments


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}{% if 'tool_calls' in message %}!{% endif %}{% endfor %}",
        "{% if tools %}<function={% endif %}{% for message in messages %}{{ message.content }}{% endfor %}",
    ],
    ids=["one that asks for the field", "one whose tool calls cannot be read"],
)
def test_an_empty_list_of_calls_is_no_call(template: str) -> None:
    """Answers of other servers have one, and clients send them back. Llama 3's template allows only lists of one."""
    answer = {"role": "assistant", "content": "Yes.", "tool_calls": []}
    body = convert({"messages": [answer, {"role": "user", "content": "Go."}]}, ChatRequest)
    assert chat_prompt(body, TEXTS, JinjaTemplate(template, {})).text == "Yes.Go."
