"""The stream of figures for the dashboard."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx

from baton.serve.http.pages import READERS_MAX
from baton.serve.live.history import KEPT_SAMPLES


@contextlib.contextmanager
def events(client: httpx.Client, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
    with client.stream("GET", f"/cluster/events{query}") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def test_a_reader_gets_the_kept_samples_and_then_new_ones(build, serve) -> None:
    house = build()
    client = serve(house)
    client.get("/health")
    house.on_loop(house.history.take)
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    house.on_loop(house.history.take)
    with events(client) as stream:
        opening, first, second = next(stream), next(stream), next(stream)
        assert (opening["model"], opening["kept_samples"]) == ("hash", KEPT_SAMPLES)
        assert [worker["role"] for worker in second["workers"]] == ["mixed"]
        assert first["unix_s"] < second["unix_s"], "no two samples at one place of a plot"
        client.post(f"/cluster/workers/{second['workers'][0]['id']}/role", json={"role": "decode"})
        house.on_loop(house.history.take)
        third = next(stream)
        assert third["marks"] == [f"{second['workers'][0]['id']}: mixed to decode"]
        host = third["hosts"][0]
        assert host["used"] + host["cached"] + host["free"] == 512
        house.on_loop(house.history.close)
        assert list(stream) == [], "the stream ends with the server"


def test_old_samples_are_dropped(build, serve) -> None:
    house = build()
    client = serve(house)

    def take_many() -> None:
        for _ in range(KEPT_SAMPLES + 5):
            house.history.take()

    client.get("/health")
    house.on_loop(take_many)
    with events(client) as stream:
        assert next(stream)["kept_samples"] == KEPT_SAMPLES
        for _ in range(KEPT_SAMPLES):
            next(stream)
        house.on_loop(house.history.close)
        assert list(stream) == []


def test_a_reader_may_ask_for_fewer_past_samples(build, serve) -> None:
    house = build()
    client = serve(house)
    client.get("/health")
    for _ in range(3):
        house.on_loop(house.history.take)
    for asked, sent in (("2", 2), ("0", 0), ("900", 3)):
        with events(client, f"?samples={asked}") as stream:
            assert next(stream)["past_samples"] == sent
    for wrong in ("901", "-1", "x", "", "9" * 5000, f"{'0' * 10}{'9' * 5000}"):
        refused = client.get("/cluster/events", params={"samples": wrong})
        assert refused.status_code == 400
        assert "samples must be an integer from 0 to 900" in refused.json()["error"]["message"]


def test_readers_are_bounded(build, serve) -> None:
    house = build()
    client = serve(house)
    with contextlib.ExitStack() as held:
        streams = [held.enter_context(events(client)) for _ in range(READERS_MAX)]
        for stream in streams:
            next(stream)
        refused = client.get("/cluster/events")
        assert refused.status_code == 503
        assert "close a dashboard" in refused.json()["error"]["message"]
        house.on_loop(house.history.close)
