"""Every trace format, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.lab.workload.load import PROBLEMS_MAX, read_trace
from baton.lab.workload.request import TraceRequest

TRACES = Path(__file__).parents[3] / "data" / "traces"

FIRST_AND_LAST = {
    "mooncake.jsonl": (
        "mooncake",
        "absolute",
        12,
        TraceRequest(
            at_s=0.0,
            input_tokens=6758,
            output_tokens=500,
            prefix_ids=tuple(range(14)),
            prefix_block_tokens=512,
        ),
    ),
    "azure.csv": ("azure", "absolute", 12, TraceRequest(at_s=0.0, input_tokens=4808, output_tokens=10)),
    "rtpllm.jsonl": (
        "rtpllm",
        "absolute",
        12,
        TraceRequest(
            at_s=0.0,
            input_tokens=7331,
            output_tokens=1,  # logged as 0
            prefix_ids=tuple(range(7)),
            prefix_block_tokens=1024,
            priority=70,
        ),
    ),
    "vtc.csv": ("vtc", "absolute", 12, TraceRequest(at_s=0.0, input_tokens=13, output_tokens=199, tenant="13")),
    "agent.jsonl": (
        "agent",
        "session",
        7,
        TraceRequest(  # 1,294 and 1,548 characters
            at_s=0.0, input_tokens=324, output_tokens=387, prefix_block_tokens=512, session="0"
        ),
    ),
    "vidur.csv": ("vidur", "none", 8, TraceRequest(at_s=0.0, input_tokens=3772, output_tokens=54)),
    "burstgpt.csv": (
        "burstgpt",
        "absolute",
        3,
        TraceRequest(at_s=0.0, input_tokens=472, output_tokens=18, session="17"),
    ),
    "burstgpt_first_release.csv": (
        "burstgpt",
        "absolute",
        2,
        TraceRequest(at_s=0.0, input_tokens=472, output_tokens=18),
    ),
    "baton.jsonl": (
        "baton",
        "absolute",
        3,
        TraceRequest(
            at_s=0.0,
            input_tokens=40,
            output_tokens=7,
            prefix_ids=(0, 1),
            prefix_block_tokens=16,
            tenant="ann",
            session="s",
            slo=Slo(ttft_s=1.0, tpot_s=0.1),
        ),
    ),
    "bailian.jsonl": (
        "bailian",
        "absolute",
        4,
        TraceRequest(
            at_s=0.0, input_tokens=40, output_tokens=12, prefix_ids=(0, 1, 2), prefix_block_tokens=16, session="11"
        ),
    ),
}


@pytest.mark.parametrize("name", FIRST_AND_LAST)
def test_every_format_is_known_by_its_content(name: str) -> None:
    """The first request, the number of requests and what the times count from."""
    form, timing, count, first = FIRST_AND_LAST[name]
    trace = read_trace(TRACES / name)
    assert (trace.format, trace.timing, len(trace.requests)) == (form, timing, count)
    assert trace.requests[0] == first
    assert all(request.input_tokens >= 1 and request.output_tokens >= 1 for request in trace.requests)


def test_sharegpt_blocks_are_full_blocks_of_16() -> None:
    trace = read_trace(TRACES / "sharegpt.jsonl")
    assert trace.format == "sharegpt"
    assert all(len(request.prefix_ids) == request.input_tokens // 16 for request in trace.requests)


def test_times_are_seconds_from_the_first_request() -> None:
    """Milliseconds, wall clocks and seconds all become seconds; the first request is at 0."""
    assert [request.at_s for request in read_trace(TRACES / "azure.csv").requests[:3]] == [0.0, 0.052, 0.098189]
    assert read_trace(TRACES / "mooncake.jsonl").requests[-1].at_s == 3.0
    assert [request.at_s for request in read_trace(TRACES / "burstgpt.csv").requests] == [0.0, 40.0, 113.0]


def test_a_chat_that_goes_on_from_another_is_of_its_session() -> None:
    """Bailian names the parent only; the session is the root of the chain."""
    requests = read_trace(TRACES / "bailian.jsonl").requests
    assert [(request.session, request.turn) for request in requests] == [("11", 0), ("12", 0), ("11", 1), ("11", 2)]


def test_azure_2024_has_time_zones(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 02:00:01.009930+02:00,10,6\n"
    )
    assert [request.at_s for request in read_trace(path).requests] == [0.0, 1.0]


@pytest.mark.parametrize("name", FIRST_AND_LAST)
def test_gzip_reads_like_plain(name: str, tmp_path: Path) -> None:
    """Told apart by content, not by name."""
    zipped = tmp_path / "trace"
    zipped.write_bytes(gzip.compress((TRACES / name).read_bytes()))
    assert read_trace(zipped) == read_trace(TRACES / name)


def test_a_limit_stops_before_later_lines(tmp_path: Path) -> None:
    """Also before bad ones: nobody looks at them."""
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n1,2\n3,4\nbad,5\n")
    assert [request.input_tokens for request in read_trace(path, limit=2).requests] == [1, 3]


def mooncake(*rows: dict[str, object]) -> str:
    base: dict[str, object] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    return "".join(json.dumps(base | row) + "\n" for row in rows)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VTC = "t_s,client,prompt_len,output_len\n"

BAD_FILES = {
    "unsorted": (mooncake({"timestamp": 9000}, {"timestamp": 8000}), r"line 2: time 8 s is before the 9 s of line 1"),
    "unsorted by the clock": (
        AZURE + "2023-11-16 18:17:03.9799600,1,2\n2023-11-16 18:17:03.5,1,2\n",
        r"line 3: time 1,700,158,623.5 s is before the 1,700,158,623.97996 s of line 2",
    ),
    "negative length": (
        mooncake({}, {"output_length": -3}),
        r"line 2: output_length is -3, but must be a whole number from 0 to 100,000,000\n.*--limit 1 ",
    ),
    "negative time": (
        mooncake({"timestamp": -1}),
        r"line 1: timestamp is -1, but must be a number of 0 or more: .*start",
    ),
    "missing columns": (
        mooncake({}) + '{"timestamp": 1, "input_length": 5}\n',
        "line 2: output_length is missing; hash_ids is missing",
    ),
    "several fields": (
        mooncake({}, {"timestamp": "soon", "hash_ids": [1, "b"]}),
        r'line 2: timestamp is soon, but must be a number.*; hash_ids is \[1,"b"\], but must be a list of whole',
    ),
    "fractional length": (mooncake({"input_length": 1.5}), r"line 1: input_length is 1.5, but must be a whole number"),
    "no length at all": (mooncake({"input_length": 10**12}), r"line 1: input_length is 1000000000000, but must be"),
    "too many blocks": (
        mooncake({"hash_ids": [1, 2, 3]}),
        r"line 1: 3 prefix blocks of 512 tokens.*fill 2; name at most 2",
    ),
    "cut-off JSON": (mooncake({}) + '{"timestamp": 1, "inp', r"line 2: .*cut off\?"),
    "cut-off CSV row": (AZURE + "2023-11-16 18:17:03.9,1,2\n2023-11-16 18:17:04.9,1", r"line 3: 2 fields .*names 3"),
    "bad time": (AZURE + "yesterday,1,2\n", r"line 2: TIMESTAMP is 'yesterday', but must be a time such as 2023-11-16"),
    "not a number": (VTC + "nan,0,1,2\n", r"line 2: .*(finite|0 or more)"),
    "infinite": (VTC + "inf,0,1,2\n", r"line 2: .*finite"),
    "empty line": (VTC + "0.5,0,1,2\n\n0.7,0,1,2\n", r"line 3: an empty line"),
    "empty": ("", r"no requests"),
    "only a header": (VTC, r"no requests"),
    "one JSON list over lines": ("\n[\n {},\n {}\n]\n", r"one JSON list; write one object a line: jq -c '.\[\]'"),
    "one JSON list": ("[{}]", r"one JSON list; write one object a line: jq -c '.\[\]'"),
    "a column short": (
        "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9,1\n",
        r"has the columns ContextTokens, TIMESTAMP. azure needs GeneratedTokens too. Known are",
    ),
    "unknown columns": ("a,b\n1,2\n", r"no known trace format has the columns a, b\. Known are mooncake"),
    "statistics": (
        "client,t_s,rate_rps,cv,pattern,param1,param2\n0,1,2,3,Gamma,4,5\n",
        r"ServeGen's statistics of clients, not requests; name both files in the \[servegen\] section",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_the_line(case: str, tmp_path: Path) -> None:
    """The message names the line, counting a CSV header as line 1."""
    content, message = BAD_FILES[case]
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


NUMBERS = {
    "mooncake.jsonl": ("timestamp", "input_length", "output_length"),
    "bailian.jsonl": ("timestamp", "input_length", "output_length"),
    "azure.csv": ("ContextTokens", "GeneratedTokens"),
    "burstgpt.csv": ("Timestamp", "Request tokens", "Response tokens"),
    "burstgpt_first_release.csv": ("Timestamp", "Request tokens", "Response tokens"),
    "rtpllm.jsonl": ("ts", "il", "ol"),
    "vtc.csv": ("t_s", "prompt_len", "output_len"),
    "sharegpt.jsonl": ("t_ms", "input_length", "output_length"),
    "agent.jsonl": ("turn", "t_ms", "input_chars", "output_chars"),
    "baton.jsonl": ("at_s", "input_tokens", "output_tokens"),
    "vidur.csv": ("num_prefill_tokens", "num_decode_tokens"),
}
"""Columns of each sample that hold a number."""


def with_value(name: str, column: str, value: object) -> tuple[str, int]:
    """The sample with another value in its second row, and the number of that line."""
    lines = (TRACES / name).read_text().splitlines()
    if name.endswith(".jsonl"):
        lines[1] = json.dumps(json.loads(lines[1]) | {column: value})
        return "\n".join(lines), 2
    fields = lines[2].split(",")
    fields[lines[0].split(",").index(column)] = str(value)
    lines[2] = ",".join(fields)
    return "\n".join(lines), 3


@pytest.mark.parametrize("value", [-3, "many", ""])
@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name, columns in NUMBERS.items() for column in columns]
)
def test_a_bad_value_is_told_with_its_line_and_what_can_be_played(
    name: str, column: str, value: object, tmp_path: Path
) -> None:
    text, line = with_value(name, column, value)
    path = tmp_path / "trace"
    path.write_text(text)
    shown = value or '""'
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    said = str(caught.value).splitlines()
    assert said[0].startswith(f"{path}, line {line}: {column} is {shown}, but must be a ")
    assert said[-1].startswith(f"{path}: --limit 1 of baton sim and baton bench plays ")
    assert read_trace(path, limit=1).requests == read_trace(TRACES / name, limit=1).requests


@pytest.mark.parametrize("name", NUMBERS)
def test_a_file_that_was_cut_off_can_be_played_up_to_there(name: str, tmp_path: Path) -> None:
    """In the middle of its last row: the message says how many requests are whole, and these can be read."""
    path = tmp_path / "trace"
    whole = (TRACES / name).read_text().rstrip()
    last = whole.rindex("\n") + 1
    path.write_text(whole[: last + 1])
    requests = read_trace(TRACES / name).requests[:-1]
    with pytest.raises(ConfigError, match=rf"cut off\?\n.*--limit {len(requests)} "):
        read_trace(path)
    assert read_trace(path, limit=len(requests)).requests == requests


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "vidur.csv"])
def test_times_that_go_back_are_refused_in_every_format(name: str, tmp_path: Path) -> None:
    lines = (TRACES / name).read_text().splitlines()
    head, rows = ([], lines) if name.endswith(".jsonl") else (lines[:1], lines[1:])
    path = tmp_path / "trace"
    path.write_text("\n".join([*head, *reversed(rows)]))
    with pytest.raises(ConfigError, match=r"line \d+: time .* s is before the .* s of line \d+; sort the file by time"):
        read_trace(path)


def test_a_mark_before_the_first_line_is_no_column(tmp_path: Path) -> None:
    for name in ("azure.csv", "mooncake.jsonl"):
        path = tmp_path / name
        path.write_text((TRACES / name).read_text(), encoding="utf-8-sig")
        assert read_trace(path) == read_trace(TRACES / name)


def test_empty_lines_before_the_first_and_after_the_last_are_none(tmp_path: Path) -> None:
    for name in ("azure.csv", "mooncake.jsonl"):
        path = tmp_path / name
        path.write_text("\n \n" + (TRACES / name).read_text() + "\n\n")
        assert read_trace(path) == read_trace(TRACES / name)


def test_objects_may_be_indented(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(f"  {line}\n" for line in (TRACES / path.name).read_text().splitlines()))
    assert read_trace(path) == read_trace(TRACES / path.name)


def test_burstgpt_as_its_second_release_has_it(tmp_path: Path) -> None:
    """Times that do not begin at 0, sessions by UUID in the chat logs and none in those of the API."""
    path = tmp_path / "BurstGPT_3.csv"
    session = "5f0c7b0e-3c55-4d8e-9d6b-1f3a0f6f2a11"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        f"19440110.0,{session},43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,,2,ChatGPT,36,0,36,API log\n"
    )
    trace = read_trace(path)
    assert trace.format == "burstgpt"
    assert [(request.at_s, request.session, request.output_tokens) for request in trace.requests] == [
        (0.0, session, 446),
        (51.0, "", 1),
    ]


def test_azure_2024_with_images_reads_as_azure(tmp_path: Path) -> None:
    """The multimodal trace has one more column, and some times have no fraction of a second."""
    path = tmp_path / "multimodal.csv"
    path.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15 00:00:00+00:00,1,900,12\n2024-10-15 00:00:00.250000+00:00,0,40,3\n"
    )
    trace = read_trace(path)
    assert (trace.format, [request.at_s for request in trace.requests]) == ("azure", [0.0, 0.25])


def test_bad_lines_come_together_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake({}, *[{"output_length": -1}] * 50))
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == PROBLEMS_MAX + 1, "and what can be played"
    assert ["line 2:" in lines[0], "line 3:" in lines[1]] == [True, True]


def test_a_damaged_gzip_says_how_far_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(mooncake(*[{"timestamp": index} for index in range(20_000)]).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut off or damaged after line [1-9]"):
        read_trace(path)


def test_what_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00weights")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read the trace: No such file"):
        read_trace(tmp_path / "nowhere")


def test_sessions_have_clocks_of_their_own() -> None:
    """The second session of the file starts at 0 again, which is no disorder."""
    requests = read_trace(TRACES / "agent.jsonl").requests
    assert [request.session for request in requests] == ["0"] * 4 + ["1"] * 3
    assert requests[4].at_s == 0.0
