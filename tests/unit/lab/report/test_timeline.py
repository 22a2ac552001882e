"""A log's workers and requests over time, and the trace for Perfetto."""

from __future__ import annotations

import json
from collections import Counter

from baton.core.messages import HostLost
from baton.core.types import WorkerView
from baton.decide.control.cluster_messages import WorkerSaid
from baton.lab.report.perfetto import REQUESTS, WORKERS, render_perfetto
from baton.lab.report.timeline import RoleSpan, read_timeline
from tests.unit.lab.report.logs import D0, D1, EVENTS, NEAR, P0, P1, log_of


def test_workers_have_roles_and_loads() -> None:
    timeline = read_timeline(log_of())
    assert (timeline.start_s, timeline.end_s) == (10.0, 15.0)
    assert list(timeline.workers) == [P0, P1, D0, D1]
    assert timeline.workers[P1].roles == [RoleSpan(10.0, 13.0, "prefill"), RoleSpan(13.0, None, "decode")]
    assert timeline.workers[D1].roles == [RoleSpan(10.0, 13.5, "decode")]


def test_what_a_worker_was_given_shows_before_it_reports_it() -> None:
    """It gets one prompt, says that it runs it, and gets another one, which waits behind the first."""
    line = read_timeline(log_of()).workers[P0]
    assert (list(line.times_s), list(line.queued_tokens)) == ([11.0, 11.5, 12.0], [200, 200, 600])
    assert (list(line.running), list(line.waiting)) == ([1, 1, 1], [0, 0, 1])


def test_a_dead_worker_runs_nothing() -> None:
    view = WorkerView(id=D0, host=NEAR, role="decode", running_requests=7, waiting_requests=2)
    busy = WorkerSaid(D0, view=view)
    line = read_timeline(log_of([*EVENTS[:4], (10.5, busy), *EVENTS[4:]])).workers[D0]
    assert (line.times_s[0], line.running[0], line.waiting[0]) == (10.5, 7, 2)
    assert (line.times_s[-1], line.running[-1], line.waiting[-1]) == (13.75, 0, 0)


def test_a_handoff_shows_before_its_worker_reports_it() -> None:
    line = read_timeline(log_of()).workers[D0]
    assert (list(line.times_s), list(line.running)) == ([12.25, 12.75, 13.75], [1, 2, 0])


def test_a_dead_host_takes_its_workers_along() -> None:
    timeline = read_timeline(log_of([*EVENTS[:4], (11.0, HostLost(NEAR, "no power"))]))
    assert timeline.workers[P0].roles == [RoleSpan(10.0, 11.0, "prefill")]
    assert timeline.workers[D0].roles == [RoleSpan(10.0, 11.0, "decode")]
    assert timeline.workers[P1].roles == [RoleSpan(10.0, None, "prefill")]


def test_requests_have_their_stations() -> None:
    asked = read_timeline(log_of()).requests["asked"]
    assert [(hop.at_s, hop.stage, hop.worker, hop.attempt) for hop in asked.hops] == [
        (12.0, "prefill", P0, 1),
        (12.75, "decode", D0, 1),
        (13.75, "decode", P1, 2),
    ]
    assert (asked.arrived_s, asked.first_token_s, asked.closed_s, asked.outcome) == (12.0, 12.75, 15.0, "finished")


def test_an_empty_log_is_an_empty_timeline() -> None:
    assert json.loads(render_perfetto(read_timeline([])))["traceEvents"]


def test_a_trace_opens_and_closes_every_slice() -> None:
    """Per request and name as many begins as ends, none ending before it began; times from the log's first event."""
    events = json.loads(render_perfetto(read_timeline(log_of())))["traceEvents"]
    slices = [event for event in events if event["pid"] == REQUESTS and event["ph"] in "be"]
    opened = Counter((event["id"], event["name"]) for event in slices if event["ph"] == "b")
    assert opened == Counter((event["id"], event["name"]) for event in slices if event["ph"] == "e")
    for name in ("asked", "busy", "late"):
        nested: list[str] = []
        for event in (event for event in slices if event["id"] == name):
            if event["ph"] == "b":
                nested.append(event["name"])
            else:
                assert nested.pop() == event["name"]
    stamps = {(event["id"], event["name"], event["ph"]): event["ts"] for event in slices}
    assert (stamps["asked", "prefill on p0", "b"], stamps["asked", "prefill on p0", "e"]) == (2e6, 2.75e6)
    assert (stamps["asked", "decode on p1", "b"], stamps["asked", "decode on p1", "e"]) == (3.75e6, 5e6)
    facts = next(event["args"] for event in slices if event["name"] == "late" and event["ph"] == "b")
    assert facts["outcome"] == "rejected"
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"p0", "p1", "d0", "d1"}
    roles = [event for event in events if event["pid"] == WORKERS and event["ph"] == "X"]
    assert sum(event["dur"] for event in roles if event["tid"] == 2) == 5e6
    assert any(event["ph"] == "C" and event["args"] == {"tokens": 200} for event in events)
    firsts = {event["id"]: event["ts"] for event in events if event["ph"] == "n"}
    assert firsts == {"busy": 2.25e6, "asked": 2.75e6}, "the one that was refused had none"
