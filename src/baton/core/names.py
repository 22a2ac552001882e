"""Help people who mistyped a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that was probably meant. None when nothing is close."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: ` (did you mean 'top_p'?)`, or nothing when no known name is close."""
    best = nearest(name, known)
    return f" (did you mean {best!r}?)" if best else ""
