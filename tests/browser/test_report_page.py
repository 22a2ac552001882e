"""The pages of runs, logs and plans in a real browser: every plot is drawn, zooms, and shows values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.lab.report.run_page import render_log
from baton.lab.report.summary import SloTargets
from baton.lab.report.timeline import read_timeline
from tests.browser.chromium import CHROMIUM, Page, chromium_page, needs_chromium
from tests.unit.lab.report.logs import log_of
from tests.unit.lab.report.test_pages import records, run_page

pytestmark = needs_chromium

EMPTY = """[...document.querySelectorAll('.plot canvas')].filter(canvas => {
    const pixels = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
    pixels.drawImage(canvas, 0, 0);
    const {data} = pixels.getImageData(0, 0, canvas.width, canvas.height);
    return !data.some((value, place) => place % 4 === 3 && value > 0);
}).map(canvas => canvas.closest('section').textContent.slice(0, 80))"""
"""Plots without a single drawn pixel."""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
PLANNED = {
    "llm": "llama3.1-8b", "hardware": "h100-sxm=8", "input-tokens": "1024", "output-tokens": "128", "rate": "10",
    "ttft-slo-s": "1", "tpot-slo-s": "0.05",
}  # fmt: skip


def page_of(name: str, folder: Path) -> str:
    timeline = read_timeline(log_of())
    if name == "run":
        return run_page(records(), SloTargets(ttft_s=0.25, tpot_s=0.1), timeline)
    if name == "log":
        return render_log(timeline, "x")
    plan = folder / "plan.html"
    words = [word for flag, value in PLANNED.items() for word in (f"--{flag}", value)]
    assert main(["plan", *words, "--html", str(plan)]) == 0
    return plan.read_text()


def see(path: Path, visit: Callable[[Page], Awaitable[None]]) -> None:
    """Open a file and let `visit` use it. Fails if the console shows an error, such as a refused request."""

    async def go() -> None:
        assert CHROMIUM is not None
        async with chromium_page(CHROMIUM, path.parent / "profile") as page:
            try:
                await page.open(path.as_uri())
                await visit(page)
            finally:
                (path.parent / "page.png").write_bytes(await page.picture())  # shows the state at a failure
            assert page.problems == []

    asyncio.run(go())


@pytest.mark.parametrize("name", ["run", "log", "plan"])
def test_every_plot_is_drawn_on_any_screen(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(name, tmp_path))

    async def visit(page: Page) -> None:
        assert await page.run("document.querySelectorAll('.plot canvas').length") >= 2
        for width in (1400, 800, 360):
            await page.resize(width, 3000)
            await page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert await page.run(SIDEWAYS) <= 0, f"scrolls sideways at {width} pixels"
            assert await page.run(EMPTY) == []
            (tmp_path / f"{name}-{width}.png").write_bytes(await page.picture())
        await page.prefer("light")
        light = await page.run(CONTRAST)
        await page.prefer("dark")
        dark = await page.run(CONTRAST)
        assert light[0] != dark[0]

    see(path, visit)


LEGENDS = """[...document.querySelectorAll('.panel')].filter(panel => panel.querySelector('.u-legend'))
    .map(panel => panel.querySelector('.u-legend .u-value').textContent)"""
LANES = """[...document.querySelectorAll('.panel')].find(panel => panel.textContent.startsWith('Workers over time'))
    .querySelector('canvas')"""


def test_plots_over_time_zoom_and_hover_together(tmp_path: Path) -> None:
    """By mouse and by keys. A zoom into one plot shows the same seconds in the others."""
    path = tmp_path / "page.html"
    path.write_text(run_page(records(), SloTargets(ttft_s=0.25), read_timeline(log_of())))

    async def visit(page: Page) -> None:
        await page.resize(1400, 6000)
        tokens = "[...document.querySelectorAll('.panel')].find(panel => panel.textContent.startsWith('Tokens'))"
        plot = f"{tokens}.querySelector('.plot')"
        await page.run(f"{plot}.focus()")
        await page.key("ArrowLeft")
        shown = f"{tokens}.querySelector('.u-legend .u-value').textContent"
        last = await page.run(shown)
        assert last.endswith(" s")
        await page.key("ArrowLeft")
        assert float((await page.run(shown)).removesuffix(" s")) < float(last.removesuffix(" s"))
        assert (await page.run(LEGENDS)).count(await page.run(shown)) >= 4, "the other plots hover at the same time"
        await page.run(f"{LANES}.focus()")
        await page.key("ArrowRight")
        words = f"{LANES}.nextElementSibling.textContent"
        assert "running" in await page.run(words)
        ends = f"(() => {{ const uPlotOf = {plot}; return uPlotOf.dataset.span; }})()"
        whole = await page.run(ends)
        await page.key("+")
        near = await page.run(ends)
        assert near != whole
        await page.key("Escape")
        assert await page.run(ends) == whole
        box = await page.run(f"(() => {{ const box = {plot}.querySelector('.u-over').getBoundingClientRect();"
                             " return [box.x, box.y, box.width, box.height]; })()")  # fmt: skip
        await page.drag(box[0] + box[2] * 0.25, box[1] + 20, box[0] + box[2] * 0.5, box[1] + 20)
        start, end = (float(part) for part in (await page.run(ends)).split(" "))
        first, last_s = (float(part) for part in whole.split(" "))
        assert start == pytest.approx(first + 0.25 * (last_s - first), rel=0.1)
        assert end == pytest.approx(first + 0.5 * (last_s - first), rel=0.1)

    see(path, visit)
