"""Workload files: what they describe, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.lab.workload.amounts import (
    Amount,
    Exponential,
    Geometric,
    LogNormal,
    Percentiles,
    Uniform,
    WeightedValues,
    sample,
    sample_count,
)
from baton.lab.workload.conversation import Turn, link_conversations
from baton.lab.workload.describe import load_workload
from baton.lab.workload.generate import generate
from baton.lab.workload.load import read_trace
from baton.lab.workload.prompts import PromptMaker
from baton.lab.workload.source import read_workload

TRACES = Path(__file__).parents[3] / "data" / "traces"

CHATS = """
requests = 400
arrivals = {kind = "poisson", rate_rps = 2}
input_tokens = {kind = "uniform", low = 20, high = 60}
output_tokens = 30

[conversation]
turns = 3
think_s = 5
followup_tokens = 10

[system_prompts]
tokens = 40
texts = 2
"""


@pytest.mark.parametrize(
    ("amount", "mean", "cv"),
    [
        (7.0, 7.0, 0.0),
        (Uniform(10, 30), 20.0, 0.2887),
        (LogNormal(800.0, 1.5), 800.0, 1.5),
        (Exponential(12.0), 12.0, 1.0),
        (Geometric(4.0), 4.0, 0.866),
        (WeightedValues((1.0, 5.0), (3.0, 1.0)), 2.0, 0.866),
    ],
)
def test_amounts_have_their_mean_and_variation(amount: Amount, mean: float, cv: float) -> None:
    draw = Random(1)
    values = [sample(amount, draw) for _ in range(60_000)]
    assert fmean(values) == pytest.approx(mean, rel=0.03)
    assert pstdev(values) / fmean(values) == pytest.approx(cv, rel=0.08, abs=1e-9)


def test_percentiles_are_met_and_nothing_is_outside() -> None:
    points = ((0.0, 10.0), (50.0, 100.0), (99.0, 1000.0), (100.0, 5000.0))
    draw = Random(1)
    values = sorted(sample(Percentiles(points), draw) for _ in range(20_000))
    assert (values[0] >= 10, values[-1] <= 5000) == (True, True)
    assert values[10_000] == pytest.approx(100, rel=0.05)
    assert sum(value > 1000 for value in values) == pytest.approx(200, abs=40)


def test_counts_are_whole_and_at_least_one() -> None:
    assert [sample_count(amount, Random(0)) for amount in (0.0, 0.4, 2.6)] == [1, 1, 3]


def test_a_tail_without_end_ends_where_no_model_reads_on() -> None:
    tail, draw = LogNormal(1e8, 1000.0), Random(0)
    assert max(sample_count(tail, draw) for _ in range(20_000)) == 100_000_000


def test_a_conversation_grows_by_answers_and_questions() -> None:
    """Each prompt begins with the prompt and the answer before it: the blocks say so, and the earliest time too."""
    requests = generate(load_workload(CHATS), seed=3).requests
    first, second, third = [request for request in requests if request.session == "session-7"]
    assert [request.turn for request in (first, second, third)] == [0, 1, 2]
    assert second.input_tokens == first.input_tokens + 30 + 10
    assert third.prefix_ids[: len(second.prefix_ids)] == second.prefix_ids
    assert second.prefix_ids[: len(first.prefix_ids)] == first.prefix_ids
    assert (first.think_s, second.think_s) == (None, 5.0)
    assert second.at_s == first.at_s + 5.0
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)


def test_system_prompts_are_shared_between_conversations_and_nothing_else_is() -> None:
    """Two texts of 40 tokens: three blocks of 16 each, before the tokens of every prompt's own."""
    openers = [request for request in generate(load_workload(CHATS), seed=3).requests if request.turn == 0]
    assert {request.prefix_ids[:3] for request in openers} == {request.prefix_ids[:3] for request in openers[:8]}
    assert len({request.prefix_ids[:3] for request in openers}) == 2
    own = [block for request in openers for block in request.prefix_ids[3:]]
    assert len(own) == len(set(own))
    assert all(68 <= request.input_tokens <= 108 for request in openers)


def test_a_context_ends_a_conversation_in_time() -> None:
    text = CHATS.replace("turns = 3", "turns = 50\ncontext_tokens = 200")
    requests = generate(load_workload(text), seed=0).requests
    assert max(request.input_tokens + request.output_tokens for request in requests) <= 200
    assert max(request.turn for request in requests) >= 1


def test_prompts_of_a_closed_loop_hold_what_was_really_said() -> None:
    """The answer was two tokens shorter than the workload meant: what is new is as long as it was meant to be."""
    requests = generate(load_workload(CHATS), seed=3).requests
    linked = link_conversations(requests)
    assert len(linked.openers) == sum(request.turn == 0 for request in requests)
    index, opener = linked.openers[0]
    turn = linked.take_next(index)
    assert turn is not None
    assert turn.request.session == opener.session
    maker = PromptMaker(seed=0)
    said = [*maker.token_ids(opener, index), *range(28)]
    prompt = turn.prompt(maker.token_ids(turn.request, turn.index), said)
    assert (prompt[: len(said)], len(prompt)) == (said, len(said) + 10)
    assert linked.take_next(index) is None
    assert [later.request.turn for later in linked.take_rest(turn.index)] == [2]


def test_a_turn_that_was_cut_says_at_least_one_word() -> None:
    """Its prompt was shortened to less than what was said before."""
    request = generate(load_workload(CHATS), seed=3).requests[-1]
    assert Turn(0, request, known_tokens=500).prompt([1, 2, 3], [7, 8]) == [7, 8, 3]
    assert Turn(0, request, known_tokens=500).prompt_tokens(2) == 2 + 1


def test_sessions_are_whole_whoever_comes_at_once() -> None:
    """Ten users at once, each with all three turns; as many requests would be the openings alone."""
    text = CHATS.replace("requests = 400", "sessions = 10").replace('"poisson", rate_rps = 2', '"at-once"')
    requests = generate(load_workload(text), seed=3).requests
    assert len(requests) == 30
    assert [request.at_s for request in requests] == [0.0] * 10 + [5.0] * 10 + [10.0] * 10
    assert {request.session: request.turn for request in requests} == {f"session-{n}": 2 for n in range(10)}
    assert generate(load_workload(text), seed=3, limit=12).requests == requests[:12]


def test_sessions_end_a_workload_that_goes_on_while_they_talk() -> None:
    """Two conversations a second, turns five seconds apart: turns stand between later openings, in order of time."""
    requests = generate(load_workload(CHATS.replace("requests = 400", "sessions = 50")), seed=3).requests
    assert len(requests) == 150
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert requests[:100] == generate(load_workload(CHATS), seed=3).requests[:100]


def test_tenants_who_come_at_once_have_their_shares() -> None:
    text = 'requests = 40\narrivals = {kind = "at-once"}\ntenants = [{name = "a", share = 3}, {name = "b"}]'
    tenants = [request.tenant for request in generate(load_workload(text), seed=0).requests]
    assert (tenants.count("a"), tenants.count("b")) == (30, 10)


def test_the_same_seed_gives_the_same_requests_and_a_limit_their_beginning() -> None:
    workload = load_workload(CHATS)
    assert generate(workload, seed=1) == generate(workload, seed=1)
    assert generate(workload, seed=1) != generate(workload, seed=2)
    assert generate(workload, seed=1, limit=50).requests == generate(workload, seed=1).requests[:50]


TENANTS = """
duration_s = 2000
arrivals = {kind = "poisson", rate_rps = 4}
input_tokens = 100
output_tokens = 10
slo = "fast"

[slo_classes]
fast = {ttft_s = 1, tpot_s = 0.1}
slow = {ttft_s = 60, tpot_s = 2}

[[tenants]]
name = "chat"
share = 3

[[tenants]]
name = "batch"
slo = "slow"
priority = 5
input_tokens = 900

[[tenants]]
name = "cron"
arrivals = {kind = "constant", rate_rps = 0.5}
"""


def test_tenants_have_their_share_their_lengths_and_their_class() -> None:
    """Shares 3 and 1 of 4/s; the third has a clock of its own."""
    by_tenant = {name: [] for name in ("chat", "batch", "cron")}
    for request in generate(load_workload(TENANTS), seed=0).requests:
        by_tenant[request.tenant].append(request)
    rates = {name: len(requests) / 2000 for name, requests in by_tenant.items()}
    assert rates == pytest.approx({"chat": 3.0, "batch": 1.0, "cron": 0.5}, rel=0.05)
    assert {(r.input_tokens, r.priority, r.slo) for r in by_tenant["batch"]} == {(900, 5, Slo(ttft_s=60, tpot_s=2))}
    assert {(r.input_tokens, r.priority, r.slo) for r in by_tenant["cron"]} == {(100, 0, Slo(ttft_s=1, tpot_s=0.1))}


def write(folder: Path, text: str) -> Path:
    path = folder / "workload.toml"
    path.write_text(text)
    return path


def test_a_workload_file_cuts_a_trace_and_promises(tmp_path: Path) -> None:
    """A path in it is relative to the workload file itself."""
    (tmp_path / "trace.csv").write_bytes((TRACES / "azure.csv").read_bytes())
    text = """
    slo = "x"
    slo_classes.x = {ttft_s = 2, tpot_s = 0.2}
    [trace]
    file = "trace.csv"
    skip = 2
    rate_scale = 2
    """
    trace = read_workload(write(tmp_path, text), seed=0, limit=5)
    whole = read_trace(TRACES / "azure.csv").requests
    assert trace.format == "azure"
    assert [request.at_s for request in trace.requests] == pytest.approx(
        [(request.at_s - whole[2].at_s) / 2 for request in whole[2:7]]
    )
    assert {request.slo for request in trace.requests} == {Slo(ttft_s=2, tpot_s=0.2)}


def test_a_workload_file_gives_a_trace_other_times(tmp_path: Path) -> None:
    """One without times too. The same seed gives the same ones; lengths and their order stay."""
    (tmp_path / "lengths.csv").write_bytes((TRACES / "vidur.csv").read_bytes())
    text = 'trace = {file = "lengths.csv", skip = 1, arrivals = {kind = "gamma", rate_rps = 2, cv = 3}}'
    path = write(tmp_path, text)
    trace = read_workload(path, seed=3)
    whole = read_trace(TRACES / "vidur.csv").requests
    assert trace.timing == "absolute"
    assert [request.input_tokens for request in trace.requests] == [request.input_tokens for request in whole[1:]]
    times_s = [request.at_s for request in trace.requests]
    assert times_s == sorted(times_s)
    assert times_s[-1] > 0
    assert read_workload(path, seed=3) == trace
    assert read_workload(path, seed=4) != trace


def test_a_limit_in_the_middle_of_an_instant_leaves_its_requests_where_they_are(tmp_path: Path) -> None:
    """Three come at once and are spread over 3 s: the first two of them are 1 s apart, not 1.5 s."""
    (tmp_path / "trace.jsonl").write_text('{"at_s": 0, "input_tokens": 9, "output_tokens": 9}\n' * 3)
    path = write(tmp_path, 'trace = {file = "trace.jsonl", spread_s = 3}')
    assert [request.at_s for request in read_workload(path, seed=0, limit=2).requests] == [0.0, 1.0]


def test_a_trace_reads_as_ever() -> None:
    assert read_workload(TRACES / "azure.csv", seed=9, limit=3) == read_trace(TRACES / "azure.csv", limit=3)


BAD = {
    "not TOML": ("requests = ", "not a TOML file"),
    "unknown key": ("requests = 1\ninput_token = 5", r"unknown key input_token \(did you mean 'input_tokens'\?\)"),
    "no end": ("input_tokens = 5", "nothing ends the workload"),
    "talk without end": (
        'requests = 5\nconversation = {}\narrivals = {kind = "at-once"}',
        "without end at 0 s: give sessions",
    ),
    "sessions of a trace": ('sessions = 5\ntrace = {file = "x"}', "sessions cannot be given with .trace."),
    "no sessions": ("sessions = 0", "sessions is 0"),
    "never ends": ('duration_s = 5\narrivals = {kind = "at-once"}', "give requests"),
    "unknown kind": (
        'requests = 1\narrivals = {kind = "posson", rate_rps = 1}',
        r"arrivals.kind is 'posson' \(did you mean 'poisson'\?\)",
    ),
    "missing rate": ('requests = 1\narrivals = {kind = "poisson"}', r"arrivals.rate_rps is missing"),
    "negative rate": ('requests = 1\narrivals = {kind = "poisson", rate_rps = -2}', r"arrivals.rate_rps is -2"),
    "negative length": ("requests = 1\ninput_tokens = -3", "input_tokens is -3"),
    "bounds": ('requests = 1\noutput_tokens = {kind = "uniform", low = 9, high = 3}', "low is 9 and high is 3"),
    "percentiles": (
        'requests = 1\noutput_tokens = {kind = "percentiles", points = [[0, 9], [100, 3]]}',
        "must not fall",
    ),
    "uniform without end": ('requests = 1\ninput_tokens = {kind = "uniform", low = 1, high = inf}', "high is inf"),
    "nothing below no end": (
        'requests = 1\nconversation = {think_s = {kind = "exponential", mean = 1, low = inf}}',
        "low is inf, but must be at most 100,000,000",
    ),
    "choices without end": ('requests = 1\ninput_tokens = {kind = "choices", values = [inf]}', "a value is inf"),
    "no choice": ('requests = 1\ninput_tokens = {kind = "choices", values = [1, nan]}', "a value is nan"),
    "no weight": (
        'requests = 1\ninput_tokens = {kind = "choices", values = [1, 2], weights = [1, nan]}',
        "a weight is nan",
    ),
    "percentiles without end": (
        'requests = 1\noutput_tokens = {kind = "percentiles", points = [[0, 9], [100, inf]]}',
        "a value of the points is inf, but must be at most 100,000,000",
    ),
    "spread without end": (
        'requests = 1\noutput_tokens = {kind = "lognormal", mean = 5, cv = 1e200}',
        "cv is 1e[+]200, but must be above 0 and at most 1,000",
    ),
    "mean without end": ('requests = 1\nconversation = {turns = {kind = "geometric", mean = inf}}', "mean is inf"),
    "think without end": ("requests = 1\nconversation = {think_s = inf}", "think_s is inf, but must be from 0 to"),
    "gaps without end": (
        'requests = 1\narrivals = {kind = "gamma", rate_rps = 1, cv = 1e200}',
        r"arrivals.cv is 1e\+200, but must be between 0.001 and 1000",
    ),
    "gaps alike": ('requests = 1\narrivals = {kind = "gamma", rate_rps = 1, cv = 1e-200}', "arrivals.cv is 1e-200"),
    "storms of nothing": (
        'requests = 1\narrivals = {kind = "bursty", rate_rps = 1, burst_s = 1e-9}',
        "arrivals.burst_s is 1e-09",
    ),
    "class": ('requests = 1\nslo = "fst"\nslo_classes.fast = {ttft_s = 1, tpot_s = 1}', "did you mean 'fast'"),
    "targets": ("requests = 1\nslo_classes.fast = {ttft_s = 0, tpot_s = 1}", "ttft_s is 0"),
    "twins": ('requests = 1\ntenants = [{name = "a"}, {name = "a"}]', "two tenants are named a"),
    "share": ('requests = 1\ntenants = [{name = "a", share = 0}]', r"tenants\[0\].share is 0"),
    "two sources": ('trace = {file = "x"}\nservegen = {arrivals = "x", lengths = "y"}', "cannot be given together"),
    "lengths of a trace": ('trace = {file = "x"}\ninput_tokens = 5', "input_tokens cannot be given with .trace."),
    "slower than nothing": ('trace = {file = "x", rate_scale = 0}', "trace.rate_scale is 0"),
    "arrivals of a trace": (
        'trace = {file = "x", arrivals = {kind = "poisson", rate_rps = 0}}',
        "trace.arrivals.rate_rps is 0, but must be between 1e-09 and 1000000000",
    ),
    "two ways to new times": (
        'trace = {file = "x", spread_s = 3, arrivals = {kind = "poisson", rate_rps = 1}}',
        "trace.spread_s and trace.arrivals cannot be given together",
    ),
    "no requests": ("requests = 0", "requests is 0"),
    "thinking": ("requests = 1\nconversation = {think_s = -1}", "conversation.think_s is -1"),
    "no text": ("requests = 1\nsystem_prompts = {tokens = 0}", "tokens is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_workloads_are_refused_with_the_numbers(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_workload(path, seed=0)
    assert all(line.startswith(f"{path}: ") for line in str(caught.value).splitlines())


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_workload(write(tmp_path, 'requets = 1\ninput_tokens = "many"\narrivals = {kind = "x"}'), seed=0)
    assert len(str(caught.value).splitlines()) == 3


def test_a_part_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes((TRACES / "azure.csv").read_bytes())
    with pytest.raises(ConfigError, match="none of its requests"):
        read_workload(write(tmp_path, 'trace = {file = "trace.csv", start_s = 1e6}'), seed=0)
    (tmp_path / "trace.csv").write_bytes((TRACES / "vidur.csv").read_bytes())
    with pytest.raises(ConfigError, match="has no arrival times"):
        read_workload(write(tmp_path, 'trace = {file = "trace.csv", start_s = 5}'), seed=0)
