"""The page at /ui in a real browser, against the real server with the hash model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.browser.chromium import Page, chromium_page, find_chromium
from tests.serving import RunningServer

CHROMIUM = find_chromium()

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on PATH, so nobody looked at the page; on Debian: apt-get install chromium",
)

WORKERS = "[...document.querySelectorAll('#workers tr')].map(row => [...row.cells].map(cell => cell.textContent))"
WATCH = """document.querySelector('#temperature').value = '0';
    window.lengths = new Set();
    new MutationObserver(records => records.forEach(record => {
        if (record.target.className === 'turn') lengths.add(record.addedNodes[0]?.data.length);
    })).observe(document.querySelector('#log'), {subtree: true, childList: true})"""
"""Answer greedily, and note every length that the answer had while it came in."""
ANSWERED = "document.querySelector('.timings') && !document.querySelector('#send').disabled"


def drive(server: RunningServer, profile: Path, visit) -> None:
    """Open the page and let `visit` use it. Nothing may show up as an error in the console."""

    async def go() -> None:
        assert CHROMIUM is not None
        async with chromium_page(CHROMIUM, profile) as page:
            await page.open(f"{server.url}/")
            try:
                await visit(page)
            finally:
                (profile / "page.png").write_bytes(await page.picture())  # for whoever reads a failure
            assert page.problems == []

    asyncio.run(go())


def test_a_conversation_and_the_cluster_live(hash_server: RunningServer, tmp_path: Path) -> None:
    """Typed, sent with the button: the answer streams in, says where its time went, and turn two knows turn one."""

    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        assert [row[:3] for row in await page.run(WORKERS)] == [
            ["prefill-0", "prefill", "ready"],
            ["decode-0", "decode", "ready"],
        ]
        await page.until("document.querySelector('#model').textContent === 'hash'")
        assert await page.run("location.pathname") == "/ui", "the bare address leads to the page"
        await page.run(WATCH)
        await page.press("#text")
        await page.type("Count to a hundred")
        await page.press("#send")
        await page.until(ANSWERED)
        assert await page.run("document.querySelector('.turn.user').textContent") == "Count to a hundred"
        assert await page.run("document.querySelector('.error')") is None
        assert await page.run("lengths.size") > 3, "the answer came in one piece"
        assert "prefill-0 → decode-0" in await page.run("document.querySelector('.timings').textContent")
        await page.press("#text")
        await page.type("and again")
        await page.press("#send")
        await page.until("document.querySelectorAll('.timings').length === 2")
        assert "cached 0 tokens" not in await page.run("document.querySelectorAll('.timings')[1].textContent")
        await page.until("Number(document.querySelector('#hosts').rows[0].cells[2].textContent) > 0")

    drive(hash_server, tmp_path, visit)


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

    drive(hash_server, tmp_path, visit)
