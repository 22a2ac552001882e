"""`baton serve` understands a command line of vLLM, or says what it has instead."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from baton.cli.foreign_flags import _NEAREST, nearest_setting, tokens
from baton.cli.main import build_parser, main
from baton.cli.serve import configuration
from baton.core.config import Config
from baton.core.errors import ConfigError


def known_flags() -> set[str]:
    """Return the flags of `baton serve`."""
    parser = build_parser(["serve"])
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return set(subparsers.choices["serve"]._option_string_actions)


def configured(*arguments: str) -> Config:
    return configuration(build_parser(["serve"]).parse_args(["serve", *arguments]))


def test_a_command_line_of_vllm_means_the_same() -> None:
    theirs = configured(
        "--model=hash", "--served-model-name=chat", "--max-model-len=2k", "--max-num-seqs=8",
        "--max-num-batched-tokens=1K", "--block-size=32", "--dtype=float", "--tensor-parallel-size=2",
        "--pipeline-parallel-size=1", "--mixed=1",
    )  # fmt: skip
    ours = configured(
        "hash", "--served-name=chat", "--context-tokens=2000", "--batch-requests=8", "--step-tokens=1024",
        "--block-tokens=32", "--dtype=float32", "--tp=2", "--pp=1", "--mixed=1",
    )  # fmt: skip
    assert theirs == ours
    assert (ours.context_tokens, ours.batch.requests_max, ours.served_name) == (2000, 8, "chat")


@pytest.mark.parametrize("flags", [(), ("--engine=vllm", "--engine-url=http://127.0.0.1:9000")])
def test_flags_of_servers_that_are_not_started_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--engine-flags, --engine-store: only for servers that Baton starts"):
        configured("hash", "--engine-flags=--max-model-len 8k", "--engine-store=pool://127.0.0.1:8700", *flags)
    assert configured("hash", "--engine=vllm", "--engine-flags=--max-model-len 8k").engines.flags


@pytest.mark.parametrize("dtype", ["half", "float16"])
def test_float16_becomes_bfloat16_and_says_so(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert configured("hash", "--dtype", dtype).dtype == "bfloat16"
    assert f"--dtype {dtype}: Baton does not compute in float16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5m", 1_500_000), ("auto", 0), ("-1", 0)]
)
def test_tokens_are_counted_as_vllm_counts_them(text: str, count: int) -> None:
    assert tokens(text) == count


@pytest.mark.parametrize("text", ["", "4kk", "-2", "k", "1e3"])
def test_other_texts_are_no_number_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give one such as"):
        tokens(text)


def test_every_flag_that_is_named_instead_exists() -> None:
    """And no flag that `baton serve` has is answered with another one."""
    known = known_flags()
    named = {flag for flag in _NEAREST for flag in re.findall(r"--[a-z][\w-]*", nearest_setting(flag))}
    assert named - known <= {"--join"}  # of `baton host`
    assert not known & set(_NEAREST)
    assert nearest_setting("--unheard-of") == ""


@pytest.mark.parametrize("flag", _NEAREST)
def test_no_flag_of_another_server_is_read_as_the_beginning_of_ours(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as --metrics of --metrics-names."""
    assert main(["serve", "hash", flag, "x"]) == 2
    assert capsys.readouterr().err == f"baton: baton serve does not take {flag}; {nearest_setting(flag)}\n"


def test_adapters_are_models_beside_their_base_model() -> None:
    config = configured("hash", "--served-model-name", "base", "--mixed=1", "--lora-modules", "a=/one", "b=/two=2")
    assert [(table.model, table.name, table.adapter) for table in config.models] == [
        ("hash", "base", ""),
        ("hash", "a", "/one"),
        ("hash", "b", "/two=2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hash", "--lora-modules", "poet"), "--lora-modules poet: give NAME=FOLDER"),
        (("hash", "hash:b", "--lora-modules", "a=/one"), "adapts one model, and there are 2"),
    ],
)
def test_adapters_without_a_name_or_a_single_base_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        configured(*arguments)


def test_the_page_for_users_of_other_servers_names_flags_that_exist() -> None:
    """Baton's flags are in the last column. Those of others exist here too, or have a nearest setting."""
    page = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text()
    lines = page.partition("## Clients")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|") and "---" not in line]
    assert len(rows) > 12
    for *others, ours in rows:
        assert set(re.findall(r"`(--[a-z][a-z-]+)", ours)) <= known_flags()
        foreign = [flag for cell in others for flag in re.findall(r"`(--?[a-z][a-z-]*)", cell)]
        assert [flag for flag in foreign if flag not in known_flags() and not nearest_setting(flag)] == []
