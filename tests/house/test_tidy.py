"""The tidy ratchet: what it refuses, what it lets pass, and that this repository is tidy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tidy
from tidy_rules import findings, words

REFUSED = {
    "def f():\n" + "    x = 1\n" * 70: "function-lines",
    "x = 1\n" * 401: "module-lines",
    "def f(a, b, c, d, e, f, g): ...": "parameters",
    "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(11)): "public-methods",
    "class BlockManager: ...": "name",
    "def run_helper(): ...": "name",
    "def f(instance_id): ...": "name",
    "page_table = {}": "name",
    "self.iterations = 0": "name",
    "def f(timeout_ms: int): ...": "unit",
    "class A:\n    size_mb: int | None = None": "unit",
    "def uptime_seconds() -> float: ...": "unit",
    "def f(timeout: float = 1.0): ...": "unit",
    "x = 1  # TODO later": "unfinished",
    "try:\n    f()\nexcept Exception:\n    raise": "broad-except",
    "try:\n    f()\nexcept:\n    raise": "broad-except",
    "try:\n    f()\nexcept (OSError, BaseException):\n    raise": "broad-except",
    "getattr(x, 'y')": "getattr",
    "setattr(x, 'y', 1)": "getattr",
    "def f(**kwargs): ...": "kwargs",
    "def f():\n    global x": "global",
    "import atexit": "atexit",
    "import os\nx = os.environ['A']": "environment",
    "from os import getenv": "environment",
    "import time\ntime.sleep(1)": "sleep",
    "from time import sleep": "sleep",
    "def f():\n    import json": "inner-import",
    "def f(limit: int = -1): ...": "sentinel",
    "class A:\n    limit: int = -1": "sentinel",
}

ACCEPTED = [
    "def f():\n" + "    x = 1\n" * 69,
    "x = 1\n" * 400,
    "class A:\n    def m(self, a, b, c, d, e, f): ...",
    "class A:\n" + "".join(f"    @property\n    def p{i}(self): ...\n" for i in range(11)),
    "class A:\n" + "".join(f"    def _m{i}(self): ...\n" for i in range(11)),
    "isinstance(x, int)",
    "def base_url(): ...",
    "def handle(event): ...",
    "def f(timeout_s: float, size_bytes: int, hit_ratio: float): ...",
    "def f(timeout: Timeout): ...",
    "ms: str = 'milliseconds on a screen'",
    "def f(step_seconds: Histogram): ...",
    "try:\n    f()\nexcept (OSError, ValueError):\n    raise",
    "def f():\n    try:\n        import nixl\n    except ImportError as e:\n        raise ModelError('install') from e",
    "def f(*parts): ...",
    "f(**options)",
    "text = 'TODO is only a word in a string'",
    "x = -1",
]


@pytest.mark.parametrize(("source", "rule"), REFUSED.items(), ids=list(REFUSED.values()))
def test_what_style_refuses_is_found_once_and_named(source: str, rule: str) -> None:
    """Each source breaks exactly one rule, and the finding says where and what to do."""
    found = findings("src/baton/decide/kv/x.py", source)
    assert [finding.rule for finding in found] == [rule]
    assert str(found[0]).startswith(f"src/baton/decide/kv/x.py:{found[0].line}: [{rule}] ")
    assert ":" in found[0].text


@pytest.mark.parametrize("source", ACCEPTED)
def test_what_looks_like_it_but_is_fine_passes(source: str) -> None:
    """False positives would teach people to ignore the tool."""
    assert [str(finding) for finding in findings("src/baton/decide/kv/x.py", source)] == []


def test_a_module_name_is_a_name_too() -> None:
    assert [finding.rule for finding in findings("src/baton/utils.py", "")] == ["name"]


def test_a_page_is_a_block_only_where_kv_is_spoken_of() -> None:
    """The server has pages to read."""
    assert findings("src/baton/server/x.py", "page = ''") == []


def test_tests_may_do_more_than_the_product_but_never_sleep() -> None:
    """A test looks from outside: it may read the environment; what waits for time is flaky anywhere."""
    assert findings("tests/test_x.py", "def f(**kwargs):\n    import os\n    os.environ['A']") == []
    assert [finding.rule for finding in findings("tests/test_x.py", "import time\ntime.sleep(1)")] == ["sleep"]


def test_names_are_split_at_underscores_and_capitals() -> None:
    assert words("KVPageTable_max_ms2") == ["kv", "page", "table", "max", "ms", "2"]


def tree(root: Path, source: str, *, baseline: dict[str, int], allow: str = "") -> Path:
    """Lay out a small repository."""
    (root / "src").mkdir()
    (root / "tools").mkdir()
    (root / "src" / "x.py").write_text(source)
    (root / tidy.BASELINE_FILE).write_text(json.dumps(baseline))
    (root / tidy.ALLOW_FILE).write_text(allow)
    return root


OLD = "src/x.py parameters f"
SEVEN = "def f(a, b, c, d, e, g, h): ..."
ENTRY = '[[allow]]\npath = "src/"\nrule = "parameters"\n'


def test_an_old_violation_passes_and_a_worse_one_does_not(tmp_path: Path) -> None:
    """7 parameters were there before; the eighth is new."""
    root = tree(tmp_path, SEVEN, baseline={OLD: 7})
    assert tidy.check(root, shrink=False) == []
    (root / "src" / "x.py").write_text("def f(a, b, c, d, e, g, h, i): ...")
    assert "8 parameters" in tidy.check(root, shrink=False)[0]


def test_the_ratchet_only_shrinks(tmp_path: Path) -> None:
    """A mended violation must leave the baseline; --shrink takes it out and adds nothing."""
    root = tree(tmp_path, "def f(a): ...\nclass XManager: ...", baseline={OLD: 9})
    assert any("lower the ratchet" in problem for problem in tidy.check(root, shrink=False))
    tidy.check(root, shrink=True)
    assert json.loads((root / tidy.BASELINE_FILE).read_text()) == {}
    assert [problem for problem in tidy.check(root, shrink=False) if "XManager" in problem]


def test_an_allowed_finding_needs_a_reason(tmp_path: Path) -> None:
    root = tree(tmp_path, SEVEN, baseline={}, allow=ENTRY + 'reason = "mirrors a foreign call"')
    assert tidy.check(root, shrink=False) == []
    (root / tidy.ALLOW_FILE).write_text(ENTRY + 'reason = "because"')
    assert any("needs path, rule and a reason" in problem for problem in tidy.check(root, shrink=False))


def test_an_allowance_that_nothing_needs_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path, "x = 1", baseline={}, allow=ENTRY + 'reason = "mirrors a foreign call"')
    assert any("matches nothing" in problem for problem in tidy.check(root, shrink=False))


def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, SEVEN, baseline={})
    assert tidy.main(["--root", str(root)]) == 1
    assert capsys.readouterr().out.startswith("src/x.py:1: [parameters] f() has 7 parameters, at most 6")


def test_this_repository_is_tidy(root: Path) -> None:
    assert tidy.check(root, shrink=False) == []
