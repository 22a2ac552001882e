"""The dashboard in a real browser, against the real server with the hash model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.browser.chromium import Page, drive, needs_chromium
from tests.serving import RunningServer

pytestmark = needs_chromium

WORKERS = "[...document.querySelectorAll('#workers tr')].map(row => [...row.cells].map(cell => cell.textContent))"
SET_ROLE = """(() => {{ const select = document.querySelectorAll('#workers select')[{row}];
    select.value = '{role}'; select.dispatchEvent(new Event('change')); }})()"""
LAST_SAMPLE = "import('/static/dashboard.js').then(page => page.store.times.at(-1))"
NEXT_SAMPLE = """import('/static/dashboard.js').then(page => new Promise(done => {{
    const look = () => {{ if (page.store.times.at(-1) !== {last}) done(true); else setTimeout(look, 50); }};
    look();
}}))"""
"""Wait for a sample after the last one."""
OUTPUT = """import('/static/dashboard.js').then(page => new Promise(done => {{
    const look = () => {{
        const later = page.store.samples.filter(sample => sample.unix_s > {since});
        const tokens = later.reduce((sum, sample) => sum + (sample.counts.output_tokens ?? 0), 0);
        if (tokens >= {least}) done(tokens); else setTimeout(look, 50);
    }};
    look();
}}))"""
"""Wait until the samples after a time have at least so many output tokens. Return how many."""


SUMS = """import('/static/dashboard.js').then(({{store}}) => {{
    const sums = {{}}, add = (name, value) => {{ sums[name] = (sums[name] ?? 0) + value; }};
    for (const sample of store.samples.filter(each => each.unix_s > {since})) {{
        for (const [name, count] of Object.entries(sample.counts)) add(name, count);
        for (const kind of ['tenants', 'classes']) for (const count of Object.values(sample[kind])) add(kind, count);
        for (const link of sample.handoffs) add(link.source + ' to ' + link.target, link.requests);
        for (const worker of sample.workers) add('steps of ' + worker.role, worker.steps);
        if (sample.latencies.decode_queue) add('seconds with a decode queue', 1);
    }}
    return sums;
}})"""
"""The sums of the samples after a time."""


def metric(server: RunningServer, name: str) -> float:
    """Return the present value of a series of /metrics."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


COUNTED = {
    "prompt_tokens": "baton_prefix_query_tokens_total",
    "cached_tokens": "baton_prefix_hit_tokens_total",
    "output_tokens": "baton_generation_tokens_total",
    "tenants": "baton_generation_tokens_total",
    "classes": "baton_generation_tokens_total",
    "finished": 'baton_requests_total{outcome="finished"}',
    "prefill-0 to decode-0": "baton_decode_queue_seconds_count",
    "steps of prefill": 'baton_step_seconds_count{role="prefill"}',
    "steps of decode": 'baton_step_seconds_count{role="decode"}',
}
"""Sums of the dashboard's samples, and the series of /metrics with which they grow."""


CANCEL = "document.querySelector('#running button[aria-label^=\"Cancel unwanted\"]')"


async def cancel_on_page(page: Page, server: RunningServer, client: httpx.AsyncClient) -> None:
    """Cancel a request with its button, which wants a second press. The decode worker is stopped meanwhile."""
    body = {"prompt": "unwanted", "max_tokens": 2000, "ignore_eos": True}
    pid = next(worker["pid"] for worker in server.cluster()["workers"] if worker["id"] == "decode-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "unwanted"}))
        await page.until(f"{CANCEL} !== null")
        await page.run(f"{{ const button = {CANCEL}; button.focus(); button.click(); }}")
        assert await page.run(f"{CANCEL}.textContent") == "sure?"
        await page.run(f"{CANCEL}.click()")
        assert (await asking).json()["error"]["code"] == "cancelled_by_operator"
    finally:
        os.kill(pid, signal.SIGCONT)
    await page.until(f"{CANCEL} === null")


def test_the_dashboard_agrees_with_the_metrics_and_shows_faults(hash_server: RunningServer, tmp_path: Path) -> None:
    """Under load, with a role changed on the page and a worker killed."""

    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        assert [[row[0], row[2]] for row in await page.run(WORKERS)] == [["prefill-0", "ready"], ["decode-0", "ready"]]
        await page.until("document.querySelector('#tiles b') !== null")
        since = await page.run(LAST_SAMPLE)
        counted = {name: metric(hash_server, name) for name in COUNTED.values()}
        body = {"prompt": "a prompt of some length", "max_tokens": 30, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=hash_server.url, timeout=60) as client:
            done = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
            assert {response.status_code for response in done} == {200}
            shown = await page.run(OUTPUT.format(since=since, least=8 * 30))
            assert shown == 8 * 30
            sums = await page.run(SUMS.format(since=since))
            grown = {name: metric(hash_server, name) - counted[name] for name in COUNTED.values()}
            assert {name: sums.get(name, 0) for name in COUNTED} == {name: grown[of] for name, of in COUNTED.items()}
            assert sums["seconds with a decode queue"] >= 1
            # Tests before this one may have used the server in the same minute.
            shares = await page.run("document.querySelector('#shares').textContent")
            tenants, classes = re.findall(r"no (?:tenant|class)(\d+) tokens, 100 %", shares)
            assert int(tenants) == int(classes) >= 240
            assert "no request was refused" in await page.run("document.querySelector('#refusals').textContent")
            await page.until("document.querySelector('#flow path') !== null")
            await page.run(SET_ROLE.format(row=1, role="mixed"))
            await page.until("document.querySelector('#marks').textContent.includes('decode-0: decode to mixed')")
            await page.run(SET_ROLE.format(row=1, role="decode"))
            await page.until("document.querySelector('#marks').textContent.includes('decode-0: mixed to decode')")
            await cancel_on_page(page, hash_server, client)
            pids = {each["id"]: each["pid"] for each in (await client.get("/cluster")).json()["workers"]}
            os.kill(pids["decode-0"], signal.SIGKILL)
            marks = "document.querySelector('#marks').textContent"
            await page.until(f"/decode-0 was lost/.test({marks}) && /ready/.test({marks})")
            await page.until("document.querySelector('#requests summary') !== null")
            await page.run("document.querySelector('#requests summary').click()")
            assert "baton explain" in await page.run("document.querySelector('#requests dl').textContent")
            await page.until(
                "document.querySelector('#requests .why').textContent.includes('start it with --log FILE')"
            )
        for width in (360, 1280):
            await page.resize(width, 2400)
            (tmp_path / f"dashboard-{width}.png").write_bytes(await page.picture())

    drive(hash_server.url, tmp_path, visit)


@pytest.mark.parametrize(("scheme", "color"), [("light", "rgb(0, 0, 0)"), ("dark", "rgb(255, 255, 255)")])
def test_it_fits_every_width_in_light_and_dark(
    hash_server: RunningServer, tmp_path: Path, scheme: str, color: str
) -> None:
    """Colors are those that the user prefers, and nobody scrolls sideways."""

    async def visit(page: Page) -> None:
        await page.prefer(scheme)
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        assert await page.run("getComputedStyle(document.body).color") == color
        for width in (360, 780, 970, 1400):
            await page.resize(width)
            assert await page.run("document.documentElement.scrollWidth") <= width

    drive(hash_server.url, tmp_path, visit)


LARGE_FLEET = """import('/static/panels.js').then(({mostRunning}) => {
    const workers = Array.from({length: 150}, (_, running) => ({running}));
    return mostRunning({samples: Array.from({length: 900}, (_, unix_s) => ({unix_s, workers}))}, [0, 900]);
})"""


def test_the_lanes_of_150_workers_are_scaled_over_15_minutes(hash_server: RunningServer, tmp_path: Path) -> None:
    """A browser passes about 120,000 arguments to a function, and there are 135,000 values."""

    async def visit(page: Page) -> None:
        assert await page.run(LARGE_FLEET) == 149

    drive(hash_server.url, tmp_path, visit)


FILL = """globalThis.filling = import('/static/dashboard.js').then(({store}) => {
    for (let count = 0; count < 100; count++) {
        const last = structuredClone(store.samples.at(-1));
        last.unix_s += 1; last.marks = ['a worker was killed'];
        last.ended = Array.from({length: 16}, (_, place) => ({
            id: `filled-${last.unix_s}-${place}`, unix_s: last.unix_s, outcome: 'finished', message: '',
            tenant: 'a', service: '', prompt_tokens: 9, output_tokens: 9, predicted_ttft_s: 0,
            timings: {e2e_s: 1, attempts: 1},
        }));
        store.add(last);
    }
    document.dispatchEvent(new Event('visibilitychange'));  // draws, as each second does
    return store.samples.length;
})"""
"""Let the samples of 100 s of a busy server arrive. Chromium may collect a promise that nothing refers to."""


async def fill(page: Page, times: int) -> None:
    """Let samples arrive, and draw after every 100 of them."""
    for _ in range(times):
        kept = await page.run(FILL)
    assert kept == 900


def test_memory_of_the_page_is_flat_once_its_history_is_full(hash_server: RunningServer, tmp_path: Path) -> None:
    """Over 20 minutes of samples of a busy server, after the 15 minutes that the page keeps.

    Compiled scripts may grow once: a leak grows in every round.
    """

    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        await fill(page, 10)
        sizes = [await page.heap_bytes()]
        while len(sizes) < 5 and (len(sizes) < 2 or sizes[-1] >= 1.05 * sizes[-2]):
            await fill(page, 12)
            sizes.append(await page.heap_bytes())
        assert sizes[-1] < 1.05 * sizes[-2], sizes

    drive(hash_server.url, tmp_path, visit)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_memory_of_the_page_is_flat_over_ten_minutes_of_load(hash_server: RunningServer, tmp_path: Path) -> None:
    """The history is first filled with samples of that load: others have another size."""
    body = {"prompt": "a prompt of some length", "max_tokens": 30, "ignore_eos": True}

    async def load_until(page: Page, client: httpx.AsyncClient, low: float, high: float) -> None:
        """Send requests with each sample until the time of the last one is between `low` and `high`."""
        while not low < (last := await page.run(LAST_SAMPLE)) < high:
            await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
            await page.run(NEXT_SAMPLE.format(last=last))

    async def least_bytes(page: Page) -> int:
        """Return the least of three sizes, because a garbage collection may come in the middle of a sample."""
        return min([await page.heap_bytes() for _ in range(3)])

    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        since = await page.run(LAST_SAMPLE)
        async with httpx.AsyncClient(base_url=hash_server.url, timeout=60) as client:
            await load_until(page, client, since + 60, since + 900)
            await fill(page, 10)
            full = await least_bytes(page)
            await load_until(page, client, since + 660, since + 900)  # filled samples are 1000 s ahead
        assert await least_bytes(page) < 1.1 * full

    drive(hash_server.url, tmp_path, visit)
