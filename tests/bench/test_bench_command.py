"""`baton bench` as a command, against a real server: loads, pacing, results, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from odd_server import Body, OddServer, Stream, serving, serving_in_thread, whole

from baton.cli.commands import build_parser
from baton.core.errors import ConfigError
from baton.lab.bench.flags import read_options
from baton.lab.bench.options import ClosedLoop, OpenLoop, TraceTimes
from baton.lab.bench.run import RunListener, run_bench
from baton.lab.workload.arrivals import AllAtOnce, BurstyArrivals, ConstantArrivals, GammaArrivals, PoissonArrivals

TRACES = Path(__file__).parents[1] / "data" / "traces"


def bench(*flags: str) -> int:
    args = build_parser(("bench",)).parse_args(["bench", *flags])
    return args.run(args)


def small(url: str, *flags: str) -> int:
    """Five short requests."""
    return bench("--url", url, "--input-tokens", "8", "--output-tokens", "4", "--requests", "5", *flags)


def test_a_synthetic_run_writes_the_results_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths are exact, warm-up is in no figure, and the page needs nothing from elsewhere."""
    server = OddServer()
    with serving_in_thread(server) as url:
        code = small(
            url, "--concurrency", "2", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"),
            "--ttft-slo-s", "30", "--tpot-slo-s", "30",
        )  # fmt: skip
    assert code == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert [results[key] for key in ("requests", "completed", "failed", "rejected")] == [5, 5, 0, 0]
    assert results["slo"] == {"ttft_s": 30.0, "tpot_s": 30.0, "attainment_ratio": 1.0}
    assert results["goodput_rps"] == results["requests_per_s"]
    assert results["output_tokens_per_s"] == pytest.approx(results["requests_per_s"] * 4)
    assert results["input_tokens_per_s"] == pytest.approx(results["requests_per_s"] * 8)
    assert len(server.streamed) == 6  # one to warm up
    page = (tmp_path / "r.html").read_text()
    assert page.count('"type":"curves"') == 11
    assert page.count('"type":"requests"') == 1
    assert "<script src" not in page
    shown = capsys.readouterr().out
    assert "TTFT" in shown
    assert "5 / 0 / 0" in shown


def test_requests_carry_what_makes_lengths_exact() -> None:
    server = OddServer(model="tiny")
    with serving_in_thread(server) as url:
        assert small(url) == 0
    body = server.streamed[-1]
    assert isinstance(body["prompt"], list)
    assert len(body["prompt"]) == 8
    assert {key: body[key] for key in body if key != "prompt"} == {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_every_prompt_is_another_and_a_seed_repeats_them() -> None:
    def prompts(*flags: str) -> list[tuple[int, ...]]:
        server = OddServer()
        with serving_in_thread(server) as url:
            assert small(url, *flags) == 0
        return [tuple(body["prompt"]) for body in server.streamed]  # type: ignore[arg-type]

    first = prompts()
    assert len(set(first)) == 6
    assert prompts() == first
    assert not set(prompts("--seed", "1")) & set(first)


def test_text_is_sent_where_ids_are_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    server = OddServer(takes_ids=False)
    with serving_in_thread(server) as url:
        assert small(url) == 0
    prompt = server.streamed[-1]["prompt"]
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 8
    shown = capsys.readouterr().out
    assert "prompts were sent as text" in shown
    assert "give --vocab-tokens" in shown


def test_ids_that_are_read_as_text_are_noticed() -> None:
    """A server that answers ids with 200 but counts other tokens has not read them as ids."""
    server = OddServer(reads_ids_as_text=True)
    with serving_in_thread(server) as url:
        assert small(url) == 0
        assert isinstance(server.streamed[-1]["prompt"], str)
        assert small(url, "--prompt-format", "ids") == 0
        assert isinstance(server.streamed[-1]["prompt"], list)


def test_chat_messages_and_another_prefix() -> None:
    """OpenVINO's server has its API under /v3."""
    server = OddServer()
    with serving_in_thread(server) as url:
        assert small(f"{url}/v3/", "--endpoint", "chat", "--no-ignore-eos", "--model", "m") == 0
    assert set(server.paths) == {"/v3/chat/completions"}
    body = server.streamed[-1]
    assert body["messages"][0]["role"] == "user"  # type: ignore[index]
    assert "ignore_eos" not in body


def test_a_trace_is_replayed_with_its_lengths_prefixes_and_order() -> None:
    """At 1000 times its speed; equal leading block ids give equal leading tokens on the wire."""
    server = OddServer()
    with serving_in_thread(server) as url:
        code = bench(
            "--url", url, "--trace", str(TRACES / "mooncake.jsonl"), "--rate-scale", "1000", "--limit", "6",
            "--warmup", "0", "--max-context", "4096",
        )  # fmt: skip
    assert code == 0
    assert len(server.streamed) == 6
    prompts = [body["prompt"] for body in server.streamed]
    assert {tuple(prompt[:512]) for prompt in prompts} == {tuple(prompts[0][:512])}  # type: ignore[index]
    assert len({tuple(prompt[512:600]) for prompt in prompts}) == 6  # type: ignore[index]
    assert all(len(body["prompt"]) + body["max_tokens"] <= 4096 for body in server.streamed)  # type: ignore[operator,arg-type]


def test_sessions_need_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    server = OddServer()
    with serving_in_thread(server) as url:
        trace = str(TRACES / "agent.jsonl")
        assert bench("--url", url, "--trace", trace) == 2
        assert "counts time from the start of each session; give --rate or --concurrency" in capsys.readouterr().err
        assert bench("--url", url, "--trace", trace, "--concurrency", "3") == 0
    assert len(server.streamed) == 1 + 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--arrivals", "at-once"), "open loop, at-once"),
        (("--rate", "500", "--arrivals", "gamma,cv=2"), "open loop, 500 requests/s (gamma, cv 2)"),
    ],
)
def test_arrivals_of_another_kind_send_every_request(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = OddServer()
    with serving_in_thread(server) as url:
        assert small(url, *flags) == 0
    assert len(server.streamed) == 1 + 5
    assert words in capsys.readouterr().out


def test_a_trace_keeps_its_rate_under_other_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    """At 1000 times the mean rate of its own times."""
    server = OddServer()
    trace = str(TRACES / "azure.csv")
    with serving_in_thread(server) as url:
        assert bench("--url", url, "--trace", trace, "--arrivals", "constant", "--rate-scale", "1000") == 0
    assert len(server.streamed) == 1 + 12
    assert "open loop, constant, rate of the trace" in capsys.readouterr().out


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """All five requests are open at once, though no answer ends before the fifth came."""
    together = asyncio.Event()

    async def wait_for_all(stream: Stream, body: Body) -> None:
        if stream.arrived == 4:
            together.set()
        await together.wait()
        await whole(stream, body)

    with serving_in_thread(OddServer(behave=wait_for_all)) as url:
        assert small(url, "--rate", "1000", "--warmup", "0", "--timeout-s", "30") == 0


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """As many open at once as there are clients, seen from the client: sending times against ends of answers."""

    async def measure(concurrency: str) -> int:
        flags = {"concurrency": concurrency, "requests": "12", "input-tokens": "8", "output-tokens": "4", "warmup": "0"}
        async with serving(OddServer()) as url:
            report = await run_bench(read_options(flags | {"url": url}), stop=asyncio.Event(), watcher=RunListener())
        records = [reply.record for reply in report.replies]
        return max(sum(other.arrival_s <= one.arrival_s < other.end_s for other in records) for one in records)

    assert asyncio.run(measure("1")) == 1
    assert asyncio.run(measure("3")) == 3


def test_the_schedule_slip_is_told_of_open_loops_only(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_thread(OddServer()) as url:
        assert small(url, "--concurrency", "2") == 0
        assert "slip" not in capsys.readouterr().out
        assert small(url, "--rate", "500") == 0
        assert "schedule slip p99" in capsys.readouterr().out


def test_answers_that_end_early_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """They count as finished (the server may not know ignore_eos), but the lengths are not those asked for."""

    async def two_tokens(stream: Stream, body: Body) -> None:
        await whole(stream, body | {"max_tokens": 2})

    with serving_in_thread(OddServer(behave=two_tokens)) as url:
        assert small(url) == 0
    assert "answers shorter than requested, ended by the server: 5" in capsys.readouterr().out


async def every_other_dies(stream: Stream, body: Body) -> None:
    if stream.arrived % 2:
        await stream.token()
        return
    await whole(stream, body)


def test_failures_make_the_run_fail_and_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_thread(OddServer(behave=every_other_dies)) as url:
        assert small(url, "--json", str(tmp_path / "r.json"), "--warmup", "0", "--ttft-slo-s", "30") == 1
    results = json.loads((tmp_path / "r.json").read_text())
    assert [results[key] for key in ("requests", "completed", "failed")] == [5, 3, 2]
    assert results["slo"]["attainment_ratio"] == 0.6
    assert "2 x cut off: the stream ended without finish_reason" in capsys.readouterr().out


def test_one_failure_is_exit_code_1_without_an_slo_too() -> None:
    async def the_last_dies(stream: Stream, body: Body) -> None:
        await (stream.token() if stream.arrived == 5 else whole(stream, body))

    with serving_in_thread(OddServer(behave=the_last_dies)) as url:
        assert small(url) == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--ttft-slo-s", "30"), 0),
        (("--ttft-slo-s", "1e-9"), 1),
        (("--ttft-slo-s", "1e-9", "--attainment-min", "0"), 0),
    ],
)
def test_a_missed_slo_is_exit_code_1(flags: tuple[str, ...], code: int) -> None:
    with serving_in_thread(OddServer()) as url:
        assert small(url, *flags) == code


def test_all_rejected_is_exit_code_1_and_no_nan(tmp_path: Path) -> None:
    with serving_in_thread(OddServer(refuse=503)) as url:
        assert small(url, "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")) == 1
    results = json.loads((tmp_path / "r.json").read_text())
    assert (results["rejected"], results["completed"], results["failed"]) == (5, 0, 0)
    assert results["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_nobody_there_is_a_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        assert small(f"http://127.0.0.1:{taken.getsockname()[1]}") == 1
    message = capsys.readouterr().err
    assert "cannot reach http://127.0.0.1:" in message
    assert "Connection refused; is the server running there?" in message


@pytest.mark.parametrize(
    ("server", "flags", "words"),
    [
        (OddServer(api_key="right"), ("--api-key", "wrong"), "HTTP 401: wrong key; give the right key with --api-key"),
        (OddServer(probe_status=503), (), "HTTP 503: not ready; wait until the server is ready"),
        (OddServer(model=None), (), "give the model's name with --model"),
        (OddServer(takes_ids=False), ("--prompt-format", "ids"), "HTTP 400: prompt must be a string; try"),
    ],
)
def test_a_server_that_cannot_be_measured_says_why(
    server: OddServer, flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_thread(server) as url:
        assert small(url, *flags) == 1
    assert words in capsys.readouterr().err
    assert server.streamed == []


def test_the_key_is_sent() -> None:
    with serving_in_thread(OddServer(api_key="right")) as url:
        assert small(url, "--api-key", "right") == 0


def test_ctrl_c_reports_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The third request never ends; the two before it are in the results."""

    async def interrupt_at_the_third(stream: Stream, body: Body) -> None:
        if stream.arrived == 2:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        await whole(stream, body)

    with serving_in_thread(OddServer(behave=interrupt_at_the_third)) as url:
        assert small(url, "--warmup", "0", "--json", str(tmp_path / "r.json")) == 1
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 2
    shown = capsys.readouterr().out
    assert "2 of 5" in shown
    assert "stopped early" in shown


def test_all_bad_arguments_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = bench(
        "--url", "localhost", "--rate", "-1", "--concurrency", "0", "--requests", "1.5", "--ttft-slo-s", "nan",
        "--attainment-min", "2", "--endpoint", "embeddings", "--prompt-format", "tokens", "--limit", "3",
        "--json", str(tmp_path / "no" / "r.json"), "--seed", "x", "--input-tokens", "0",
    )  # fmt: skip
    assert code == 2
    errors = capsys.readouterr().err
    for flag in (
        "--url localhost", "--rate is '-1'", "--concurrency is '0'", "--rate and --concurrency", "--requests is '1.5'",
        "--ttft-slo-s is 'nan'", "--attainment-min is '2'", "--endpoint is 'embeddings'", "--prompt-format is 'tokens'",
        "--limit needs --trace", "--json", "--seed is 'x'", "--input-tokens is '0'",
    ):  # fmt: skip
        assert f"baton bench: {flag}" in errors


def test_a_bad_trace_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t_s,client,prompt_len,output_len\n2,0,5,5\n1,0,5,5\n")
    assert bench("--url", "http://127.0.0.1:9", "--trace", str(path)) == 2
    assert "line 3: time 1 s is before the 2 s of line 2" in capsys.readouterr().err


URL = {"url": "http://h:1"}
TRACE = {"trace": str(TRACES / "vtc.csv")}


def test_pacing_follows_from_the_flags() -> None:
    assert read_options(URL).pacing == ClosedLoop(1)
    assert read_options(URL | TRACE).pacing == TraceTimes()
    assert read_options(URL | {"rate": "2.5"}).pacing == OpenLoop(2.5, PoissonArrivals(1.0))
    assert read_options(URL | {"rate": "2.5", "arrival-cv": "0"}).pacing == OpenLoop(2.5, ConstantArrivals(1.0))
    assert read_options(URL | {"rate": "2.5", "arrival-cv": "1"}).pacing == OpenLoop(2.5, PoissonArrivals(1.0))
    gamma = OpenLoop(2.5, GammaArrivals(1.0, 3.0))
    assert read_options(URL | {"rate": "2.5", "arrival-cv": "3"}).pacing == gamma
    assert read_options(URL | {"rate": "2.5", "arrivals": "gamma,cv=3"}).pacing == gamma
    assert read_options(URL | TRACE | {"arrivals": "bursty"}).pacing == OpenLoop(None, BurstyArrivals(1.0))
    assert read_options(URL | {"arrivals": "at-once"}).pacing == OpenLoop(None, AllAtOnce())
    assert read_options(URL | TRACE | {"concurrency": "4"}).pacing == ClosedLoop(4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--url is missing"),
        (URL | TRACE | {"rate": "1", "rate-scale": "2"}, "--rate and --rate-scale"),
        (URL | TRACE | {"input-tokens": "5"}, "the trace has its own lengths"),
        (URL | {"rate-scale": "2"}, "--rate-scale needs --trace"),
        (URL | {"arrival-cv": "2"}, "--arrival-cv needs --rate"),
        (URL | {"arrivals": "gamma,cv=2"}, "--arrivals needs --rate R, or a --trace with a mean rate to keep"),
        (URL | {"arrivals": "gama,cv=2", "rate": "1"}, "--arrivals: there are no arrivals 'gama' .did you mean"),
        (URL | {"arrivals": "gamma,cv=2", "arrival-cv": "2", "rate": "1"}, "--arrivals gamma,cv=X does the same"),
        (URL | TRACE | {"arrivals": "bursty", "concurrency": "3"}, "--arrivals and --concurrency cannot be given"),
        (URL | {"arrivals": "at-once", "rate": "1"}, "--arrivals at-once and --rate cannot be given together"),
        (URL | {"trace": "nowhere.csv"}, "--trace nowhere.csv: no such file"),
        (URL | {"endpoint": "chat", "prompt-format": "ids"}, "a chat message is text"),
        ({"url": "http://h:99999"}, "not a URL"),
    ],
)
def test_flags_that_contradict_are_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(flags)


@pytest.mark.parametrize(
    ("url", "base"),
    [("http://h:8000", "/v1"), ("http://h:8000/", "/v1"), ("http://h:8000/v1/", "/v1"), ("http://h/llm/v3", "/llm/v3")],
)
def test_a_bare_host_gets_v1(url: str, base: str) -> None:
    assert read_options({"url": url}).url.endswith(base)
