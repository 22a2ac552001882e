"""What `policies.py` plays: real traces near and above capacity, a load that shifts, and loads never tuned on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

from msgspec import convert
from msgspec.structs import replace

from baton.core.types import Slo
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.load import read_rows, read_trace
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import cut_trace, redraw_arrivals, scale_rate, spread_arrivals
from baton.lab.workload.servegen import ArrivalRow, Statistics, read_length_row

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
Half = Literal["first", "second"]
HOUR_S: dict[Half, float] = {"first": 18_000.0, "second": 36_000.0}
"""Where the hour begins that ServeGen's requests are drawn from."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and what its clients were promised."""

    name: str
    trace: Callable[[Half, int], Trace]
    """Makes it, of the first or the second half in time, with at most so many requests."""
    slo: Slo
    requests: int = 600
    is_tuned_on: bool = True
    """Options of ours were chosen on its first half from the beginning. The others came later, to see what was not
    tuned on; since then their first halves are chosen on, too. No second half is."""


def from_file(file: str, rate_scale: float, spread_s: float, half: Half, requests_max: int) -> Trace:
    """Take half of a trace, played faster so that the four accelerators are near their capacity or above."""
    return part(file, rate_scale, spread_s, (0.0, 0.5) if half == "first" else (0.5, 1.0), requests_max)


@cache
def read_once(file: str) -> Trace:
    return read_trace(TRACES / file)


def part(file: str, rate_scale: float, spread_s: float, between: tuple[float, float], requests_max: int) -> Trace:
    """Take what lies between two shares of a trace's time."""
    trace = read_once(file)
    end_s = trace.requests[-1].at_s
    start_s, last_s = (share * end_s for share in between)
    trace = cut_trace(trace, start_s=start_s, duration_s=last_s - start_s, skip=0)
    if spread_s:
        trace = spread_arrivals(trace, spread_s)
    return scale_rate(replace(trace, requests=trace.requests[:requests_max]), rate_scale)


def shifting(half: Half, requests_max: int) -> Trace:
    """Long prompts with short answers, then short prompts with long answers, in turns of 8 s.

    The first keeps three of the four accelerators busy with prompts, the second three with answers.
    """
    turn_s, requests, at_s = 8.0, [], 0.0
    offset = 0 if half == "first" else 1
    while len(requests) < requests_max:
        heavy = int(at_s / turn_s + offset) % 2 == 0
        place = len(requests)
        prompt, answer, gap_s = (6000, 20, 0.085) if heavy else (250, 500, 0.020)
        jitter = 0.5 + ((place * 7919) % 1000) / 1000
        at_s += gap_s * jitter
        wide = 0.6 + ((place * 104_729) % 800) / 1000
        requests.append(TraceRequest(at_s=at_s, input_tokens=int(prompt * wide), output_tokens=int(answer * wide)))
    return Trace(format="made", timing="absolute", requests=tuple(requests))


def later(file: str, rate_scale: float, spread_s: float, half: Half, requests_max: int) -> Trace:
    """Take the later quarter of that half of a trace's time."""
    return part(file, rate_scale, spread_s, (0.25, 0.5) if half == "first" else (0.75, 1.0), requests_max)


def articles(_: Half, requests_max: int) -> Trace:
    """Prompts and answers of arXiv summaries, which have no times: 22 of them a second by chance."""
    trace = read_trace(TRACES / "lengths/arxiv_summarization.first80.csv.gz", limit=requests_max)
    return redraw_arrivals(trace, PoissonArrivals(22.0), Random(0))


def drawn_of(model: str, rate_scale: float, half: Half, requests_max: int, seed: int = 0) -> Trace:
    """Requests drawn from what ServeGen counted of a model's clients in an hour, another one for each half."""
    arrivals, lengths = (TRACES / f"servegen/{model}.{what}.first80.csv.gz" for what in ("arrivals", "lengths"))
    counted = Statistics(
        arrivals=[convert(fields, ArrivalRow, strict=False) for _, fields in read_rows(arrivals)],
        lengths=[read_length_row(fields) for _, fields in read_rows(lengths)],
    )
    drawn = counted.requests(start_s=HOUR_S[half], duration_s=3600.0, rate_scale=rate_scale, seed=seed)
    return Trace(format="servegen", timing="absolute", requests=tuple(islice(drawn, requests_max)))


CHAT, CODE, LONG = Slo(ttft_s=1.0, tpot_s=0.03), Slo(ttft_s=1.5, tpot_s=0.03), Slo(ttft_s=5.0, tpot_s=0.05)
CONV_FILE, CODE_FILE = "azure2023/conv.first80.csv.gz", "azure2023/code.first80.csv.gz"
MOON_FILE, TOOL_FILE = "mooncake/conversation.first80.jsonl.gz", "mooncake/synthetic.first80.jsonl.gz"
CASES = (
    Case("azure-conv-tight", partial(from_file, CONV_FILE, 9.0, 0.0), Slo(ttft_s=0.5, tpot_s=0.015)),
    Case("azure-conv-over", partial(from_file, CONV_FILE, 13.0, 0.0), CHAT),
    Case("azure-code", partial(from_file, CODE_FILE, 9.0, 0.0), CODE),
    Case("shifting", shifting, Slo(ttft_s=1.5, tpot_s=0.03)),
    Case("mooncake-conversation", partial(from_file, MOON_FILE, 1.5, 3.0), LONG, 220),
    Case("mooncake-synthetic", partial(from_file, TOOL_FILE, 1.5, 0.0), LONG, 220),
    Case("rtp-llm", partial(from_file, "rtpllm/online_pd.first80.jsonl.gz", 1.0, 0.0), LONG, 220),
    Case("azure-conv-later", partial(later, CONV_FILE, 11.0, 0.0), Slo(ttft_s=0.75, tpot_s=0.02), is_tuned_on=False),
    Case("mooncake-later", partial(later, MOON_FILE, 1.8, 3.0), LONG, 220, is_tuned_on=False),
    Case("arena", partial(from_file, "vtc_arena/arena27.first80.csv.gz", 40.0, 0.0), CHAT, is_tuned_on=False),
    Case("articles", articles, CODE, is_tuned_on=False),
    Case("reasoning", partial(drawn_of, "deepseek-r1", 0.65), Slo(ttft_s=2.0, tpot_s=0.03), is_tuned_on=False),
)
