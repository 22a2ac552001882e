"""Page generators render a small source completely, and `check.py` reports every failure."""

from __future__ import annotations

import argparse
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import benchmark_published
import benchmark_results
import check
import docgen
import gen_cli_doc
import gen_config_doc
import msgspec
import pytest


class Inner(msgspec.Struct):
    """A section."""

    size_bytes: int = 0
    """How large. 0 chooses."""


class Plug(msgspec.Struct):
    """Has no default of its own."""

    use: str


class Outer(msgspec.Struct):
    """The whole."""

    name: str
    mode: Literal["a", "b"] | None = None
    """What | it does."""
    inner: Inner = msgspec.field(default_factory=Inner)
    plug: Plug = msgspec.field(default_factory=lambda: Plug("m:C"))
    keys: tuple[str, ...] = ()


def test_every_key_has_its_type_default_and_meaning() -> None:
    """Sections are linked, bars are escaped, defaults are what TOML would say."""
    seen: dict[type[msgspec.Struct], list[str]] = {}
    gen_config_doc.sections(Outer, "", seen)
    assert seen == {Outer: [""], Inner: ["inner"], Plug: ["plug"]}
    lines = gen_config_doc.section(Outer, seen[Outer])
    assert "| `name` | text | required |  |" in lines
    assert "| `mode` | `a`/`b` | none | What \\| it does. |" in lines
    assert "| `inner` | [Inner](#inner) |  |  |" in lines
    assert '| `plug` | [Plug](#plug) | `{"use":"m:C"}` |  |' in lines
    assert "| `keys` | list of text | empty |  |" in lines
    assert "| `size_bytes` | integer | `0` | How large. 0 chooses. |" in gen_config_doc.section(Inner, ["inner"])


def test_every_argument_has_its_spelling_default_and_meaning() -> None:
    parser = argparse.ArgumentParser(prog="x", description="Do it.")
    commands = parser.add_subparsers()
    run = commands.add_parser("run", help="run it")
    run.add_argument("model", nargs="?", metavar="MODEL", help="what to run")
    run.add_argument("--rate-rps", type=float, default=2.0, metavar="R", help="how fast (default %(default)s)")
    run.add_argument("--kind", choices=("a", "b"), required=True, help="which")
    run.add_argument("--quiet", action="store_true", help="say nothing")
    walk = commands.add_parser("walk", help="walk it")
    walk.add_argument("--quiet", action="store_true", help="say nothing")
    lines = gen_cli_doc.section(parser, "", 2)
    assert lines[:3] == ["## x", "", "Do it."]
    assert "### x run" in lines
    assert "| `[MODEL]` |  | what to run |" in lines
    assert "| `--rate-rps R` | 2.0 | how fast |" in lines
    assert "| `--kind a\\|b` | required | which |" in lines
    assert lines.count("| `--quiet` |  | say nothing |") == 1
    assert lines[lines.index("### x walk") :] == ["### x walk", "", "walk it", "", "As for `x run`: `--quiet`", ""]


def test_an_outdated_page_is_told_with_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """Compared with a page that is not there, nothing is written."""
    assert docgen.publish("no-such-page.md", lambda: "line", ["--check"]) == 1
    told = capsys.readouterr().err
    assert "run `make docs`" in told
    assert "+line" in told
    assert not (docgen.ROOT / "docs" / "no-such-page.md").exists()


def test_a_result_is_stale_without_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is then left out of the page."""
    monkeypatch.setattr(benchmark_results, "RESULTS", tmp_path)
    (tmp_path / "kept.json").write_text('{"command": "python benchmarks/record.py --x"}')
    (tmp_path / "gone.json").write_text('{"command": "python benchmarks/no_such.py"}')
    assert not benchmark_results.is_stale("kept")
    assert benchmark_results.is_stale("gone")
    assert benchmark_results.is_stale("never_measured")


def test_every_row_of_published_results_names_its_function() -> None:
    rows = tomllib.loads(benchmark_published.ROWS_FILE.read_text())["row"]
    assert {row["simulated"] for row in rows} == set(benchmark_published.SIMULATED)


def test_a_failed_check_shows_what_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    """One that passes takes one line, and the lines stand in the order of the checks."""
    bad = check.Check("bad", (sys.executable, "-c", "print('why'); raise SystemExit(3)"))
    good = check.Check("good", (sys.executable, "-c", "print('noise')"))
    with ThreadPoolExecutor(2) as pool:
        assert not check.report([pool.submit(check.run, each) for each in (bad, good)])
    assert capsys.readouterr().out == "FAILED bad\nwhy\nok     good\nLINT FAILED: bad\n"


def test_checks_run_beside_the_tests_and_pytest_has_the_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed check fails the run, though every test has passed."""
    bad = check.Check("bad", (sys.executable, "-c", "raise SystemExit(3)"))
    tests = [sys.executable, "-c", "print('dots'); print('2 passed')"]
    with ThreadPoolExecutor(1) as pool:
        assert not check.tests(tests, [pool.submit(check.run, bad)])
        assert check.tests(tests, [])
    failed = ["dots", "FAILED bad", "(no output; exit code 3)", "LINT FAILED: bad", "2 passed"]
    assert capsys.readouterr().out.splitlines() == [*failed, "dots", "2 passed"]
