"""The page of a run in a real browser: everything is drawn, inside its frame, on any screen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.lab.report.run_page import render_log
from baton.lab.report.summary import SloTargets
from baton.lab.report.timeline import read_timeline
from tests.browser.chromium import CHROMIUM, Page, chromium_page, needs_chromium
from tests.unit.lab.report.logs import log_of
from tests.unit.lab.report.test_pages import records, run_page

pytestmark = needs_chromium

OUTSIDE = """[...document.querySelectorAll('svg')].flatMap(svg => {
    const box = svg.viewBox.baseVal;
    return [...svg.querySelectorAll('text, rect, polyline, polygon, line')].filter(part => {
        const at = part.getBBox();
        return at.x < -1 || at.y < -1 || at.x + at.width > box.width + 1 || at.y + at.height > box.height + 1;
    }).map(part => svg.getAttribute('aria-label') + ': ' + (part.textContent || part.outerHTML.slice(0, 80)));
})"""
"""Labels and shapes that leave their drawing."""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"


def pages() -> dict[str, str]:
    timeline = read_timeline(log_of())
    return {"run": run_page(records(), SloTargets(ttft_s=0.25, tpot_s=0.1), timeline), "log": render_log(timeline, "x")}


@pytest.mark.parametrize("name", ["run", "log"])
def test_everything_is_inside_its_frame_on_any_screen(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(pages()[name])

    async def visit(page: Page) -> None:
        await page.open(path.as_uri())
        assert await page.run("[...document.querySelectorAll('svg')].every(svg => svg.clientHeight > 50)")
        assert await page.run(OUTSIDE) == []
        for width in (1400, 800, 390):
            await page.resize(width)
            assert await page.run(SIDEWAYS) <= 0, f"scrolls sideways at {width} pixels"
        await page.prefer("light")
        light = await page.run(CONTRAST)
        await page.prefer("dark")
        dark = await page.run(CONTRAST)
        assert light[0] != light[1]
        assert (dark[0] != light[0], dark[1] != light[1]) == (True, True)
        assert page.problems == []

    async def go() -> None:
        assert CHROMIUM is not None
        async with chromium_page(CHROMIUM, tmp_path / "profile") as page:
            try:
                await visit(page)
            finally:
                (tmp_path / "page.png").write_bytes(await page.picture())  # for whoever reads a failure

    asyncio.run(go())
