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
OUTPUT = """import('/static/dashboard.js').then(page => new Promise(done => {{
    const look = () => {{
        const later = page.store.samples.filter(sample => sample.unix_s > {since});
        const tokens = later.reduce((sum, sample) => sum + (sample.counts.output_tokens ?? 0), 0);
        if (tokens >= {least}) done(tokens); else setTimeout(look, 50);
    }};
    look();
}}))"""
"""Wait until the samples after a time have at least so many output tokens. Return how many."""


def generated_tokens(server: RunningServer) -> float:
    """Return the output tokens that the server has counted so far."""
    found = re.search(r"^baton_generation_tokens_total (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


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
        counted = generated_tokens(hash_server)
        body = {"prompt": "a prompt of some length", "max_tokens": 30, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=hash_server.url, timeout=60) as client:
            done = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
            assert {response.status_code for response in done} == {200}
            shown = await page.run(OUTPUT.format(since=since, least=8 * 30))
            assert shown == generated_tokens(hash_server) - counted == 8 * 30
            await page.until("document.querySelector('#flow path') !== null")
            await page.run(SET_ROLE.format(row=1, role="mixed"))
            await page.until("document.querySelector('#marks').textContent.includes('decode-0: decode to mixed')")
            await page.run(SET_ROLE.format(row=1, role="decode"))
            await page.until("document.querySelector('#marks').textContent.includes('decode-0: mixed to decode')")
            await cancel_on_page(page, hash_server, client)
            pids = {each["id"]: each["pid"] for each in (await client.get("/cluster")).json()["workers"]}
            os.kill(pids["decode-0"], signal.SIGKILL)
            await page.until("/decode-0 is ready/.test(document.querySelector('#marks').textContent)")
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
