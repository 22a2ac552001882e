"""Closed loops: a turn comes after the answer before it, and repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from odd_server import OddServer, Stream, serving_in_thread

from baton.cli.main import main

TALK = """
requests = 6
arrivals = {kind = "at-once"}
input_tokens = 5
output_tokens = 3
conversation = {turns = 3, think_s = 0, followup_tokens = 2}
"""


def run(url: str, folder: Path, *flags: str, warmup: int = 0) -> dict[str, int]:
    (folder / "talk.toml").write_text(TALK)
    out = folder / "results.json"
    fixed = ("--url", url, "--trace", str(folder / "talk.toml"), "--warmup", str(warmup), "--json", str(out))
    main(["bench", *fixed, *flags])
    return json.loads(out.read_text())


async def numbered(stream: Stream, body: dict[str, object]) -> None:
    """Answers with its own number, so that one can see who repeats it."""
    for token in range(cast(int, body["max_tokens"])):
        await stream.token(f" answer{stream.arrived}" if token == 0 else " x")
    await stream.finish()
    await stream.usage(cast(int, body["max_tokens"]))
    await stream.done()


@pytest.mark.parametrize("pacing", [(), ("--concurrency", "1")])
def test_a_turn_repeats_what_was_said(tmp_path: Path, pacing: tuple[str, ...]) -> None:
    """Two conversations of three turns: each prompt is the one before, its answer, and two new words."""
    server = OddServer(behave=numbered)
    with serving_in_thread(server) as url:
        results = run(url, tmp_path, *pacing)
    assert (results["requests"], results["completed"]) == (6, 6)
    prompts = [str(body["prompt"]) for body in server.streamed]
    openers = [prompt for prompt in prompts if len(prompt.split()) == 5]
    assert len(openers) == 2
    for opener in openers:
        number = prompts.index(opener)
        second = next(prompt for prompt in prompts if prompt.startswith(f"{opener} answer{number} x x "))
        assert len(second.split()) == 5 + 3 + 2
        third = next(prompt for prompt in prompts if prompt.startswith(f"{second} answer{prompts.index(second)} x x "))
        assert len(third.split()) == 5 + 3 + 2 + 3 + 2


def test_to_warm_up_is_no_conversation(tmp_path: Path) -> None:
    """All six are sent as they are, and nobody thinks."""
    server = OddServer(behave=numbered)
    with serving_in_thread(server) as url:
        run(url, tmp_path, warmup=6)
    assert not any("answer" in str(body["prompt"]) for body in server.streamed[:6])
    assert sum("answer" in str(body["prompt"]) for body in server.streamed[6:]) == 4


def test_a_chat_sends_its_turns_as_messages(tmp_path: Path) -> None:
    server = OddServer(behave=numbered)
    with serving_in_thread(server) as url:
        run(url, tmp_path, "--endpoint", "chat", "--concurrency", "1")
    messages = cast(list[dict[str, str]], server.streamed[2]["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[:3] == [*cast(list[dict[str, str]], server.streamed[1]["messages"])]
    assert messages[1]["content"] == " answer0 x x"
    assert len(messages[4]["content"].split()) == 2


def test_a_conversation_ends_where_an_answer_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both openers are refused: four turns never come. They are rejected too, as in the simulator."""
    server = OddServer(refuse=503)
    with serving_in_thread(server) as url:
        results = run(url, tmp_path, "--ttft-slo-s", "30")
    assert len(server.streamed) == 2
    assert (results["requests"], results["rejected"]) == (6, 6)
    assert "4 x the previous turn of its conversation failed" in capsys.readouterr().out


def test_lost_turns_miss_the_slo(tmp_path: Path) -> None:
    """One of two conversations fails at its second turn: its third turn counts, as the first does."""

    async def second_turn_fails(stream: Stream, body: dict[str, object]) -> None:
        if "answer0" in str(body["prompt"]):
            await stream.token()
            return
        await numbered(stream, body)

    with serving_in_thread(OddServer(behave=second_turn_fails)) as url:
        results = run(url, tmp_path, "--ttft-slo-s", "30")
    assert (results["requests"], results["completed"], results["failed"]) == (6, 4, 2)
    assert cast("dict[str, float]", results["slo"])["attainment_ratio"] == pytest.approx(4 / 6)


def test_token_ids_cannot_carry_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talk.toml").write_text(TALK)
    url = "http://127.0.0.1:9"
    flags = ["--url", url, "--trace", str(tmp_path / "talk.toml"), "--prompt-format", "ids"]
    assert main(["bench", *flags]) == 2
    assert "cannot carry conversations" in capsys.readouterr().err


def test_the_page_of_a_run_shows_the_workers_of_a_baton_server(tmp_path: Path) -> None:
    """Looked up while the run goes; any other server has no such path, and the page no such section."""
    workers = [{"id": "decode-0", "role": "decode", "running": 3, "waiting": 1, "pid": 7}]
    page = tmp_path / "run.html"
    for server, shown in ((OddServer(behave=numbered, workers=workers), True), (OddServer(behave=numbered), False)):
        with serving_in_thread(server) as url:
            run(url, tmp_path, "--html", str(page))
        assert ("<h2>Workers</h2>" in page.read_text()) is shown
        assert ("decode-0" in page.read_text()) is shown


def test_a_tenant_is_the_user_of_its_requests(tmp_path: Path) -> None:
    """So that the server's fairness and shares can tell them apart."""
    text = 'requests = 2\narrivals = {kind = "at-once"}\n[[tenants]]\nname = "ann"\n'
    (tmp_path / "two.toml").write_text(text)
    server = OddServer()
    with serving_in_thread(server) as url:
        assert main(["bench", "--url", url, "--trace", str(tmp_path / "two.toml"), "--warmup", "0"]) == 0
    assert [body.get("user") for body in server.streamed] == ["ann", "ann"]
