"""Draw plots as inline SVG, without scripts or libraries.

Colors come from the page's style, so that they follow light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Box = tuple[float, float, float, float]
"""A rectangle in pixels: left, right, top, height."""

LINE = 14
"""Line height of text, in pixels."""
WIDTH, WIDE, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 1300, 230, 56, 14, 16, 34
"""Sizes in pixels. `WIDE` is the width of a plot that spans the page; one scale keeps the text size equal
everywhere."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Map from data to pixels. Both axes begin at 0 unless `x_min` is set."""

    x_max: float
    y_max: float
    x_min: float = 0.0
    height: int = HEIGHT
    left: int = LEFT
    width: int = WIDTH

    def x(self, value: float) -> float:
        span = self.x_max - self.x_min or 1.0
        return round(self.left + (self.width - self.left - RIGHT) * (value - self.x_min) / span, 1)

    def y(self, value: float) -> float:
        return round(self.height - BOTTOM - (self.height - BOTTOM - TOP) * value / (self.y_max or 1.0), 1)

    def axes(self, x_unit: str, y_unit: str) -> str:
        """Return the axes: grid lines and labels at round numbers, and the units."""
        right, floor = self.width - RIGHT, self.height - BOTTOM
        parts: list[str] = []
        for value in ticks(0.0, self.y_max, 4):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{y + 4}" text-anchor="end">{short(value)}</text>')
        for value in ticks(self.x_min, self.x_max, 6):
            x = self.x(value)
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{floor}" y2="{floor + 4}"/>')
            parts.append(f'<text x="{x}" y="{floor + 16}" text-anchor="middle">{short(value)}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" x2="{right}" y1="{floor}" y2="{floor}"/>')
        parts.append(f'<text x="{right}" y="{self.height - 4}" text-anchor="end">{escape(x_unit)}</text>')
        parts.append(f'<text x="{self.left}" y="{TOP - 4}" text-anchor="start">{escape(y_unit)}</text>')
        return "".join(parts)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` round numbers between two values, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number in short form for an axis: 1200000 -> 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def svg(frame: Frame, content: str, name: str) -> str:
    box = f"0 0 {frame.width} {frame.height}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(name)}">{content}</svg>'


def polyline(frame: Frame, xs: Sequence[float], ys: Sequence[float], kind: str = "a") -> str:
    points = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline class="curve {kind}" points="{points}"/>'


def steps(frame: Frame, borders: Sequence[float], values: Sequence[float], kind: str = "a") -> str:
    """Return a step curve that is constant across each bin, over a filled area."""
    if not len(values):
        return ""
    points: list[str] = []
    for left, right, value in zip(borders[:-1], borders[1:], values, strict=True):
        y = frame.y(value)
        points += [f"{frame.x(left)},{y}", f"{frame.x(right)},{y}"]
    floor = frame.y(0)
    area = f"{frame.x(borders[0])},{floor} {' '.join(points)} {frame.x(borders[-1])},{floor}"
    return f'<polygon class="area {kind}" points="{area}"/><polyline class="curve {kind}" points="{" ".join(points)}"/>'


def vertical(frame: Frame, value: float, label: str, *, above: float | None = None) -> str:
    """Return a dashed vertical line at an x value with a label: at the top, or `above` lines above the x axis."""
    x, floor = frame.x(value), frame.height - BOTTOM
    line = f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{floor}"/>'
    return line + beside(frame, x, TOP + 12 if above is None else floor - 6 - LINE * above, label)


def beside(frame: Frame, x: float, y: float, label: str) -> str:
    """Return a label to the right of a pixel, or to the left of it near the plot's right end."""
    anchor, dx = ("end", -4) if x > frame.width * 0.7 else ("start", 4)
    return f'<text class="marked" x="{x + dx}" y="{y}" text-anchor="{anchor}">{escape(label)}</text>'


def rectangle(box: Box, kind: str, words: str = "", opacity: float = 1.0) -> str:
    """Return a rectangle. `words` appear as its tooltip."""
    shade = "" if opacity >= 1 else f' fill-opacity="{opacity:.2f}"'
    x1, x2, y, height = box
    place = f'x="{x1}" y="{y}" width="{round(max(x2 - x1, 0.3), 1)}" height="{height}"'
    if not words:
        return f'<rect class="{kind}" {place}{shade}/>'
    return f'<rect class="{kind}" {place}{shade}><title>{escape(words)}</title></rect>'
