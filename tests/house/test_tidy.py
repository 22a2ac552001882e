"""The tidy ratchet: what it refuses and what it lets pass. `make lint` holds this repository to it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import tidy
from tidy_commits import SINCE, commit_findings, commit_subjects
from tidy_prose import prose_findings
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
    assert findings("src/baton/serve/x.py", "page = ''") == []


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
    assert tidy.check(root).problems == []
    (root / "src" / "x.py").write_text("def f(a, b, c, d, e, g, h, i): ...")
    assert "8 parameters" in tidy.check(root).problems[0]


def test_the_baseline_only_shrinks(tmp_path: Path) -> None:
    """An entry without a finding is noted; --shrink removes it and adds nothing."""
    root = tree(tmp_path, "def f(a): ...\nclass XManager: ...", baseline={OLD: 9})
    assert any("some findings are gone" in note for note in tidy.check(root).notes)
    tidy.check(root, shrink=True)
    assert json.loads((root / tidy.BASELINE_FILE).read_text()) == {}
    assert [problem for problem in tidy.check(root).problems if "XManager" in problem]


def test_an_allowed_finding_needs_a_reason(tmp_path: Path) -> None:
    root = tree(tmp_path, SEVEN, baseline={}, allow=ENTRY + 'reason = "mirrors a foreign call"')
    assert tidy.check(root).problems == []
    (root / tidy.ALLOW_FILE).write_text(ENTRY + 'reason = "because"')
    assert any("needs path, rule and a reason" in problem for problem in tidy.check(root).problems)


def test_an_allowance_that_nothing_needs_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A note becomes a failure with --strict."""
    root = tree(tmp_path, "x = 1", baseline={}, allow=ENTRY + 'reason = "mirrors a foreign call"')
    assert tidy.main(["--root", str(root)]) == 0
    assert "matches nothing" in capsys.readouterr().out
    assert tidy.main(["--root", str(root), "--strict"]) == 1


def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, SEVEN, baseline={})
    assert tidy.main(["--root", str(root)]) == 1
    assert "src/x.py:1: [parameters] f() has 7 parameters, at most 6" in capsys.readouterr().out


NOT_PLAIN = {
    '"""Nobody waits."""': "subject",
    '"""Wait.\n\nFor whoever asks."""': "subject",
    '"""Who waits is served."""': "subject",
    '"""The worker who waits."""': "subject",
    '"""What is held is freed."""': "subject",
    '"""Free it. That which is held."""': "subject",
    "# freed by somebody": "subject",
    "# One line,\n# then nobody.": "subject",
    'raise ValueError(f"{name}: nobody answers")': "subject",
    'def f():\n    """See `g`."""': "see-only",
    'class A:\n    """See `g` and `h`. Also here."""': "see-only",
}
PLAIN = [
    '"""Say what is missing."""',
    '"""For users who bring their own model."""',
    '"""Return the worker of `nobody`."""',
    '"""Seed the draw."""',
    'user = "nobody"',
    '"""Free the blocks (see `g`)."""',
]


@pytest.mark.parametrize(("source", "rule"), NOT_PLAIN.items())
def test_prose_without_a_clear_subject_is_found(source: str, rule: str) -> None:
    assert [finding.rule for finding in prose_findings("src/x.py", source)] == [rule]


@pytest.mark.parametrize("source", PLAIN)
def test_plain_prose_passes(source: str) -> None:
    assert [str(finding) for finding in prose_findings("src/x.py", source)] == []


def test_a_document_is_read_without_its_code() -> None:
    page = "# Title\n\n```sh\nid nobody\n```\n\n`nobody` may.\n\nThen nobody may."
    assert [(finding.line, finding.rule) for finding in prose_findings("docs/x.md", page)] == [(9, "subject")]
    assert [finding.line for finding in prose_findings("src/x.cpp", "int x;\n// nobody")] == [2]


def test_old_prose_is_counted_per_folder(tmp_path: Path) -> None:
    """Moving a file does not make its findings new; one more of them is."""
    root = tree(tmp_path, "# for nobody", baseline={"src subject": 1})
    (root / "src" / "x.py").rename(root / "src" / "y.py")
    assert tidy.check(root).problems == []
    (root / "src" / "x.py").write_text("# for nobody")
    assert tidy.check(root).problems == [
        "src: 2 findings of [subject], the baseline has 1: list them with `tools/tidy.py --all src`"
    ]


def test_commit_subjects_name_their_area_and_stay_short() -> None:
    subjects = [
        ("a" * 40, "transfer: cap in-flight bytes per link"),
        ("b" * 40, "What ran beside the validation is said as it was"),
        ("c" * 40, "docs: " + "x" * 67),
    ]
    found = list(commit_findings(subjects))
    assert [finding.name for finding in found] == ["b" * 12, "c" * 12]
    assert "does not begin with `area: `" in found[0].text
    assert "73 characters, at most 72" in found[1].text


def test_commits_before_the_rule_are_not_held_to_it(tmp_path: Path) -> None:
    """Where there is no history, a note says that nothing was checked."""
    assert "no git checkout" in commit_subjects(tmp_path)[1]

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "Before the rule")
    (tmp_path / "tools").mkdir()
    (tmp_path / SINCE).write_text("")
    git("add", ".")
    git("commit", "-q", "-m", "tidy: check commit subjects")
    git("commit", "-q", "--allow-empty", "-m", "After the rule")
    subjects, note = commit_subjects(tmp_path)
    assert [subject for _, subject in subjects] == ["After the rule"]
    assert note == ""
