"""150 requests of every kind at once: lengths, cancels in every state, bad ones. Nothing may be left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.serving import NO_TLS, RunningServer, nothing_used, serving

REQUESTS = 150
CONCURRENCY = 48


async def _one(client: httpx.AsyncClient, rng: random.Random, outcomes: dict[str, int]) -> None:
    """Send one request of a random kind, and leave it at a random moment."""
    prompt = rng.choice(["shared system prompt, the same for many. " * 3, ""]) + "x" * rng.randint(1, 900)
    body = {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 200),
        "seed": rng.randint(0, 9),
        "ignore_eos": rng.random() < 0.5,
        "stream": True,
        "n": rng.choice([1, 1, 1, 3]),
    }
    kind = rng.random()
    if kind < 0.1:
        bad = rng.choice([{"max_tokens": -1}, {"temperature": "hot"}, {"prompt": "y" * 20000}, {"top_p": 7}])
        response = await client.post("/v1/completions", json={**body, **bad, "stream": False})
        assert response.status_code == 400, response.text
        outcomes["refused"] += 1
        return
    patience = rng.choice([0, rng.randint(1, 60)]) if kind < 0.5 else None
    chunks = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        if patience == 0:
            outcomes["left at once"] += 1
            return
        last = ""
        async for line in response.aiter_lines():
            chunks += line.startswith("data: ")
            last = line or last
            if patience is not None and chunks >= patience:
                outcomes["left in the middle"] += 1
                return
    assert last == "data: [DONE]"
    outcomes["finished"] += 1


async def _storm(server: RunningServer, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    outcomes = {"refused": 0, "left at once": 0, "left in the middle": 0, "finished": 0}
    # The server closes connections that were idle for 5 s. This client must not use one at that moment.
    limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, verify=NO_TLS) as client:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def gated() -> None:
            async with gate:
                await _one(client, rng, outcomes)

        await asyncio.gather(*(gated() for _ in range(REQUESTS)))
    return outcomes


def _overfill(server: RunningServer) -> None:
    """Run three choices of 94 blocks each. Two share a decode worker and its steps, so they need 188 blocks at once."""
    body = {"prompt": "a choice of three", "max_tokens": 1500, "ignore_eos": True, "temperature": 1, "n": 3}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 3 * 1500


def _settled(server: RunningServer) -> dict:
    return server.wait_until(
        lambda state: nothing_used(state) and all(w["running"] + w["waiting"] == 0 for w in state["workers"]),
        reason="every request has ended and every block is free",
    )


@pytest.mark.parametrize(
    "blocks", [pytest.param(2048, id="roomy", marks=pytest.mark.deep), pytest.param(160, id="tight")]
)
def test_after_a_storm_of_requests_every_block_is_back(blocks: int) -> None:
    """INV-2, INV-4: no block used, free + cached = total. 160 blocks are too few for all, so requests are preempted."""
    with serving("hash", "--prefill", "2", "--decode", "2", "--kv-blocks", str(blocks)) as server:
        outcomes = asyncio.run(_storm(server, seed=blocks))
        assert all(count > 0 for count in outcomes.values()), outcomes
        (host,) = _settled(server)["hosts"]
        assert host["kv_blocks_free"] + host["kv_blocks_cached"] == host["kv_blocks_total"] == blocks
        assert server.metric("baton_kv_blocks") == blocks
        if blocks == 160:
            _overfill(server)
            assert server.metric("baton_preemptions_total") > 0
            _settled(server)
        assert server.stop() == 0, server.output()


def test_more_requests_than_fit_queue_preempt_and_finish_with_the_right_text(
    hash_server: RunningServer,
) -> None:
    """16 requests of up to 600 tokens over 60 blocks of 16: they cannot all run, and each gives its own text."""
    bodies = [
        {"prompt": f"request {index} " * 10, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "seed": index}
        for index in range(16)
    ]

    async def everything(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=NO_TLS) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]

    expected = asyncio.run(everything(hash_server.url))
    with serving("hash", "--kv-blocks", "60") as server:
        assert asyncio.run(everything(server.url)) == expected
        assert server.metric("baton_preemptions_total") > 0
        assert _settled(server)


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with 20 blocks that admits two requests at once."""
    config = tmp_path_factory.mktemp("small") / "baton.toml"
    config.write_text("[policy.admission]\nuse = 'bounded-queue'\noptions = {requests_max = 2}\n")
    with serving("hash", "--kv-blocks", "20", "--config", str(config)) as server:
        yield server


def test_what_can_never_fit_is_refused_at_once_with_both_numbers(small_server: RunningServer) -> None:
    with small_server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "z" * 321, "max_tokens": 1})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "321" in message
        assert "320" in message or "319" in message
        fits = client.post("/v1/completions", json={"prompt": "z" * 300, "max_tokens": 1000, "ignore_eos": True})
        assert fits.raise_for_status().json()["usage"]["total_tokens"] == 320


def test_a_full_queue_refuses_with_503_and_says_when_to_come_back(small_server: RunningServer) -> None:
    with small_server.client() as client:
        body = {"prompt": "hello", "max_tokens": 50, "n": 4}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert "2" in answer.json()["error"]["message"]
        assert _settled(small_server)
        assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5}).status_code == 200
