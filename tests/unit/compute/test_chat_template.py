"""Chat templates render as their models expect, and cannot harm the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.compute.hash_engine import hash_card
from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import ChatInput, find_template
from baton.compute.sandbox.template import load_chat_template
from baton.compute.sandbox.work import JinjaTemplate
from baton.core.config import SandboxConfig
from baton.core.errors import ModelError, RequestError

HELLO = [{"role": "user", "content": "hi"}]


def _folder_card(folder: Path) -> ModelCard:
    return ModelCard(
        name="m",
        path=str(folder),
        format="safetensors",
        architecture="llama",
        layers=1,
        kv_heads=1,
        head_dim=1,
        vocab_tokens=1,
        context_tokens=1,
        eos_token_ids=(),
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ bos_token }}{% for m in messages %}\n  [{{ m['role'] }}]{{ m.content | trim }}\n{% endfor %}",
            "<s>  [user]hi\n",
        ),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is none %}none{% endif %}{% if not tools %}!{% endif %}", "none!"),
        (
            "{% for m in messages %}{% generation %}{{ m.content ~ '-' ~ loop.index }}{% endgeneration %}{% endfor %}",
            "hi-1",
        ),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'é': '<b>'} | tojson }}", '{"é": "<b>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say('a') + say('b') }}", "<a><b>"),
        ("{{ 'a' * 3 ~ 2 * 3 }}", "aaa6"),
        ("{{ missing }}{{ messages[0].missing }}{% if missing is defined %}no{% endif %}", ""),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_supported_template_features(source: str, expected: str) -> None:
    template = JinjaTemplate(source, {"bos_token": "<s>"})
    assert template.render(ChatInput(HELLO, extra={"enable_thinking": False})) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({}) }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe|undefined"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% include 'other' %}", "loader"),
    ],
)
def test_a_refusal_or_a_forbidden_operation_of_a_template_is_a_400(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        JinjaTemplate(source, {}).render(ChatInput(HELLO))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
        "{{ 'a' * 1000000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{{ 'a'.center(10000000000) }}{{ 'a' | center(10000000000) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% for i in [1, 2] %}{% if n %}{{ m(n - 1) }}{% endif %}{% endfor %}{% endmacro %}{{ m(50) }}",
        "{{ range(10000000000) | list }}",
    ],
)
def test_an_endless_template_is_stopped(source: str) -> None:
    """Loops, recursion and growing strings are bounded. The server answers 400."""
    with pytest.raises((RequestError, ModelError)):
        JinjaTemplate(source, {}).render(ChatInput(HELLO))


def test_a_broken_template_is_found_at_the_start() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        JinjaTemplate("{% for %}", {})


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    """chat_template.jinja has priority over tokenizer_config.json. Of several named templates, `default` is used."""
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}config{{ eos_token }}",
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert load_chat_template(_folder_card(tmp_path), SandboxConfig()).render(ChatInput(HELLO)) == "<s>config</s>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain{{ eos_token }}"}]
    path.write_text(json.dumps({**config, "chat_template": named}))
    assert load_chat_template(_folder_card(tmp_path), SandboxConfig()).render(ChatInput(HELLO)) == "plain</s>"
    (tmp_path / "chat_template.jinja").write_text("file{{ bos_token }}")
    assert load_chat_template(_folder_card(tmp_path), SandboxConfig()).render(ChatInput(HELLO)) == "file<s>"


def test_a_large_template_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match="not a file of at most 1048576 bytes"):
        find_template(_folder_card(tmp_path))


def test_a_model_without_a_template_rejects_chats(tmp_path: Path) -> None:
    """A model gives bad answers in a guessed format."""
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        load_chat_template(_folder_card(tmp_path), SandboxConfig()).render(ChatInput(HELLO))


def test_the_hash_model_has_a_plain_one() -> None:
    template = load_chat_template(hash_card(), SandboxConfig())
    assert template.render(ChatInput(HELLO)) == "user: hi\nassistant: "
    assert template.render(ChatInput(HELLO, add_generation_prompt=False)) == "user: hi\n"
