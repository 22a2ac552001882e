"""`baton explain --url`: the decisions about a request of a server that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.messages import RequestArrived
from baton.serve.live.log_file import read_log
from tests.command_line import Done, baton
from tests.serving import RunningServer, serving

KEY = "operator"
SALT = "known-to-one-tenant"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def logging_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server that keeps a log and asks for a key; one request, `asked`, has been answered."""
    log = tmp_path_factory.mktemp("log") / "decisions.log"
    with serving("hash", "--log", str(log), "--api-key", KEY) as server:
        _complete(server, "asked")
        yield server, log


def _complete(server: RunningServer, request_id: str) -> None:
    with server.client() as client:
        body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "cache_salt": SALT}
        client.post("/v1/completions", json=body, headers={**HEADERS, "x-request-id": request_id}).raise_for_status()


def _explain(*arguments: str) -> Done:
    return baton("explain", *arguments)


def test_a_running_server_is_explained_as_its_log_is(logging_server: tuple[RunningServer, Path]) -> None:
    server, log = logging_server
    asked = _explain("asked", "--url", server.url, "--api-key", KEY)
    assert asked.returncode == 0, asked.stderr
    assert "> prefill-0" in asked.stdout
    assert "which worker decodes?" in asked.stdout
    assert "closed: finished" in asked.stdout
    assert asked.stdout == _explain("asked", "--log", str(log)).stdout


def test_everything_that_the_policies_saw_comes_as_json(logging_server: tuple[RunningServer, Path]) -> None:
    story = json.loads(_explain("asked", "--url", logging_server[0].url, "--api-key", KEY, "--json", "-").stdout)
    subjects = [question["subject"] for moment in story["moments"] for question in moment["questions"]]
    assert subjects == ["admit", "prefill", "decode"]
    assert (story["outcome"], story["output_tokens"], story["differences"]) == ("finished", 4, 0)


def test_a_server_explains_its_requests_itself(logging_server: tuple[RunningServer, Path]) -> None:
    """For the dashboard, in the same words as the command."""
    server, log = logging_server
    with server.client() as client:
        found = client.get("/cluster/explain/asked", headers=HEADERS).raise_for_status().json()
        unknown = client.get("/cluster/explain/--log", headers=HEADERS)
    assert found == json.loads(_explain("asked", "--log", str(log), "--json", "-").stdout)
    assert unknown.status_code == 404
    assert "no request '--log' among its" in unknown.json()["error"]["message"]


def test_the_log_that_a_server_sends_is_the_one_on_its_disk(
    logging_server: tuple[RunningServer, Path], tmp_path: Path
) -> None:
    server, log = logging_server
    with server.client() as client:
        sent = client.get("/cluster/log", headers=HEADERS).raise_for_status()
    copy = tmp_path / "copy.log"
    copy.write_bytes(sent.content)
    assert sent.headers["baton-log-full"] == "no"
    assert log.read_bytes().startswith(sent.content)
    assert any(isinstance(decision.event, RequestArrived) for decision in read_log(copy)[1])
    assert SALT.encode() not in sent.content, "whoever reads the log must not learn how to share a tenant's blocks"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("asked", "--api-key", "wrong"), "answers 401; give a key with --api-key"),
        (("asked",), "answers 401; give a key with --api-key"),
        (("nobody", "--api-key", KEY), "no request 'nobody' among its"),
    ],
)
def test_what_cannot_be_explained_is_exit_code_2(
    logging_server: tuple[RunningServer, Path], arguments: tuple[str, ...], words: str
) -> None:
    done = _explain(*arguments, "--url", logging_server[0].url)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_server_without_a_log_says_how_to_keep_one(hash_server: RunningServer) -> None:
    done = _explain("asked", "--url", hash_server.url)
    assert done.returncode == 2
    assert "keeps no decision log; start it with --log FILE" in done.stderr
    with hash_server.client() as client:
        answer = client.get("/cluster/explain/asked")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_decision_log")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "http://127.0.0.1:1"), "there is no Baton server at http://127.0.0.1:1"),
        (("--url", "ftp://x"), "is not an HTTP address"),
        (("--url", "http://[x"), "is not an HTTP address"),
        (("--log", "x.log", "--api-key", "k"), "--api-key is for a server, and --log names a file"),
        (("--log", "x.log", "--url", "http://127.0.0.1:1"), "not allowed with"),
    ],
)
def test_bad_sources_are_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = _explain("asked", *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_log_says_why_a_request_is_not_in_it(tmp_path: Path) -> None:
    """The server goes on when its log is full; whoever asks for a later request has to know."""
    config, log = tmp_path / "baton.toml", tmp_path / "decisions.log"
    config.write_text("log_bytes_max = 2000\nlog_kept_bytes_max = 2000\n")
    log.write_text("of an earlier run")
    with serving("hash", "--config", str(config), "--log", str(log)) as server:
        for index in range(5):
            _complete(server, f"request-{index}")
        done = _explain("request-4", "--url", server.url)
    assert done.returncode == 2
    assert "the log is full, and later requests are not in it" in done.stderr
    assert (tmp_path / "decisions.log.1").read_text() == "of an earlier run"


def test_the_arrivals_of_a_live_server_are_simulated(
    logging_server: tuple[RunningServer, Path], tmp_path: Path
) -> None:
    """Its fleet and its policies come from the log; what came of the same arrivals stands beside it."""
    out = tmp_path / "found.json"
    done = baton("replay", str(logging_server[1]), "--simulate", "--policy", "round-robin", "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    counts = [(found[run]["requests"], found[run]["completed"]) for run in ("log", "as_logged", "other")]
    assert counts == [(1, 1)] * 3
    assert found["log"]["ttft_s"]["mean"] > 0
