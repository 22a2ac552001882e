"""The console for tables. A module of its own: servers and hosts print none, and rich takes 60 ms to import."""

from __future__ import annotations

from rich.console import Console

WIDTH = 120
"""Width of tables in characters if the output is not a terminal."""


def wide_console() -> Console:
    """Return a console of the terminal's width, or of at least `WIDTH` characters if the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDTH))
