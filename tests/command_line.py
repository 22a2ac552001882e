"""The command line without a new process, whose imports take a second."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from baton.cli.main import main


@dataclass(frozen=True)
class Done:
    """The end of a command, as `subprocess.CompletedProcess` has it."""

    returncode: int
    stdout: str
    stderr: str


def baton(*arguments: str) -> Done:
    """Run `baton ARGUMENTS` in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse ends this way
            code = int(end.code or 0)
    return Done(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))
