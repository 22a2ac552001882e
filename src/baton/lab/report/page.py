"""Build a report page: one HTML file without scripts or links, with headings, tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#667085;--line:#e3e7ec;--back:#fff;--card:#f8f9fb;
--a:#2463c9;--b:#d9822b;--c:#1d8a6b;--bad:#c4302b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#97a1b0;--line:#2c333d;--back:#13171d;--card:#1a1f27;
--a:#6ea3f7;--b:#f0a35e;--c:#4cc39d;--bad:#f0726d}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1380px;
margin:2rem auto;padding:0 1.2rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .6rem}h3{font-size:.95rem;margin:0 0 .3rem}
.sub{color:var(--soft);margin:.2rem 0 1.2rem}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem 1rem;min-width:8.5rem}
.tile b{display:block;font-size:1.3rem;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.82rem}
table{border-collapse:collapse;margin-bottom:1rem;font-variant-numeric:tabular-nums}
td,th{padding:.25rem 1rem .25rem 0;text-align:right;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}td:first-child,th:first-child{text-align:left}
.columns{display:flex;flex-wrap:wrap;gap:1rem 4rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(500px,100%),1fr));gap:1rem}
.plot{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem .4rem}
.plot.wide{grid-column:1/-1}
svg{width:100%;height:auto;display:block}text{fill:var(--soft);font-size:11px}
.marked{font-size:10px}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.curve{fill:none;stroke-width:1.6;stroke-linejoin:round}
.curve.a{stroke:var(--a)}.curve.b{stroke:var(--b)}.curve.c{stroke:var(--c)}.curve.bad{stroke:var(--bad)}
.area{stroke:none;fill-opacity:.16}.area.a{fill:var(--a)}.area.b{fill:var(--b)}.area.c{fill:var(--c)}
.area.bad{fill:var(--bad)}
rect.a,rect.prefill{fill:var(--b)}rect.decode{fill:var(--a)}rect.mixed{fill:var(--c)}rect.heat{fill:var(--a)}
rect.heat2{fill:var(--b)}rect.bad{fill:var(--bad)}
line.wait{stroke:var(--b)}line.decode{stroke:var(--a)}line.bad{stroke:var(--bad)}
.key{color:var(--soft);font-size:.82rem;margin:.2rem 0}.key i{font-style:normal;font-weight:600}
.key .a{color:var(--a)}.key .b{color:var(--b)}.key .c{color:var(--c)}.key .x{color:var(--bad)}
ul{padding-left:1.2rem}
"""

Rows = Iterable[Sequence[str]]


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>{"".join(sections)}</body></html>\n'
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
    return f"<table>{f'<tr>{top}</tr>' if head else ''}{body}</table>"


def notes(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def plots(cards: Iterable[str]) -> str:
    content = "".join(cards)
    return f'<div class="plots">{content}</div>' if content else ""


def plot(title: str, drawing: str, key: str = "", *, wide: bool = False) -> str:
    """Return a card with a plot, or an empty string without a drawing. `key` is trusted HTML and is not escaped."""
    if not drawing:
        return ""
    legend = f'<p class="key">{key}</p>' if key else ""
    kind = "plot wide" if wide else "plot"
    return f'<div class="{kind}"><h3>{escape(title)}</h3>{drawing}{legend}</div>'
