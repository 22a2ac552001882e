"""Build a report page: one HTML file with tables and plots, which contains its styles and scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources

import msgspec

from baton.lab.report.drawings import Drawing

_STYLES = ("uplot.css", "style.css")
_MODULES = ("common.js", "plots.js", "report.js")
"""The modules of the page, each after those that it imports. Their top-level names differ."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
"""Content-Security-Policy of a page: it loads nothing."""

Rows = Iterable[Sequence[str]]


@cache
def _scripts() -> tuple[str, str, str]:
    """Return the styles, uPlot, and the dashboard's modules as one module."""
    site = resources.files("baton.serve.http").joinpath("site")
    styles = "".join(site.joinpath(name).read_text(encoding="utf-8") for name in _STYLES)
    modules = "".join(site.joinpath(name).read_text(encoding="utf-8") for name in _MODULES)
    joined = _EXPORT.sub("", _IMPORT.sub("", modules))
    return styles, site.joinpath("uplot.js").read_text(encoding="utf-8"), joined


def short_number(value: float | None) -> str:
    """Return a number with four digits, or all before the point. None: `-`."""
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    styles, uplot, modules = _scripts()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{styles}</style>'
        f'<script>{uplot}</script><script type="module">{modules}</script></head><body class="report">'
        f'<h1>{escape(title)}</h1><p class="muted">{escape(subtitle)}</p>{"".join(sections)}</body></html>\n'
    )


def section(title: str, content: str) -> str:
    """Return a section with a heading, or an empty string if there is no content."""
    return f"<h2>{escape(title)}</h2>{content}" if content else ""


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts
    )
    return f'<div class="tiles">{cells}</div>'


def table(head: Sequence[str], rows: Rows) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{f"<tr>{top}</tr>" if head else ""}{body}</table></div>'


def notes(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def plots(cards: Iterable[str]) -> str:
    content = "".join(cards)
    return f'<div class="panels">{content}</div>' if content else ""


def plot(title: str, drawing: Drawing | None, note: str = "", *, wide: bool = False) -> str:
    """Return a card with a plot, or an empty string without a drawing. The page's script draws it from its data."""
    if drawing is None:
        return ""
    data = msgspec.json.encode(drawing).decode().replace("<", "\\u003c")  # no text may end the script
    content = f'<div class="plot"></div><script type="application/json">{data}</script>'
    return card(title, content, note, wide=wide)


def card(title: str, content: str, note: str = "", *, wide: bool = False) -> str:
    """Return a card. `content` is trusted HTML and is not escaped."""
    kind = "panel wide" if wide else "panel"
    return f'<section class="{kind}"><h2>{escape(title)} <small>{escape(note)}</small></h2>{content}</section>'
