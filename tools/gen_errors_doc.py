"""Write the table of errors in docs/api.md from src/baton/core/errors.py (`--check`: only compare)."""

from __future__ import annotations

import inspect
import sys

from docgen import cell, publish_block, table

from baton.core import errors


def families() -> list[type[errors.BatonError]]:
    """Return every error class, in the order of its definition."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BatonError)]


def render() -> str:
    rows = [[f"`{kind.__name__}`", cell(inspect.getdoc(kind) or "")] for kind in families()]
    return table(["Error", "Meaning"], rows)


if __name__ == "__main__":
    sys.exit(publish_block("docs/api.md", "gen_errors_doc.py", render, sys.argv[1:]))
