"""The installer tells what it does, does it once, and says what to do where it cannot."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import install
import pytest

NOT_OFFERED_ONCE = """import sys
print(*sys.argv[1:], file=open("calls.txt", "a"))
if "--require-hashes" in sys.argv:
    sys.exit("ERROR: No matching distribution found for tiny==1.0")
"""
"""A pip whose index lacks a locked version."""

RECORDS_CALLS = 'import sys; open("calls.txt", "a").write(" ".join(sys.argv[1:]) + "\\n")'
TINY, OTHER = ("tiny==1.0 \\\n    --hash=sha256:00\n", "other==2.0 \\\n    --hash=sha256:00\n")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip runs and writes its log in."""
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "LOG", tmp_path / "install.log")
    return tmp_path


def write_locks(folder: Path) -> None:
    """Write the locks of a project that serves with one package, and tests with two."""
    (folder / "locks").mkdir()
    for name, text in (("base", TINY), ("dev", TINY + OTHER), ("node", "")):
        (folder / "locks" / f"{name}.txt").write_text("# made by a tool\n" + text)


def make_wheel(folder: Path) -> str:
    """Write the wheel of an empty package into a folder, and return its hash."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("tiny-1.0.dist-info/METADATA", about)
        opened.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr("tiny-1.0.dist-info/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_wrong_hash_is_no_reason_to_install_without_hashes(elsewhere: Path) -> None:
    """An index without the version is one. The real pip tells them apart."""
    right = make_wheel(elsewhere)
    pip = install.pip_command()
    arguments = ["--no-index", "--find-links", ".", "--require-hashes", "--no-deps", "--target", "site", "-r", "lock"]
    (elsewhere / "lock").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}")
    with pytest.raises(install.InstallError, match="DO NOT MATCH THE HASHES") as wrong:
        install.pip_install(pip, arguments)
    assert not isinstance(wrong.value, install.NotOfferedError)
    (elsewhere / "lock").write_text(f"tiny==2.0 --hash=sha256:{right}")
    with pytest.raises(install.NotOfferedError):
        install.pip_install(pip, arguments)
    (elsewhere / "lock").write_text(f"tiny==1.0 --hash=sha256:{right}")
    install.pip_install(pip, arguments)
    assert (elsewhere / "site" / "tiny-1.0.dist-info").is_dir()


def test_a_platform_beyond_the_locks_gets_the_ranges(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told. With `--locked` the install fails instead."""
    (elsewhere / "pip.py").write_text(NOT_OFFERED_ONCE)
    write_locks(elsewhere)
    pip = [sys.executable, "pip.py"]
    with pytest.raises(install.NotOfferedError, match="for tiny"):
        install.install_packages(pip, ["dev"], locked=True)
    assert "hashes are not checked" not in capsys.readouterr().err
    install.install_packages(pip, ["dev"], locked=False)
    assert "hashes are not checked" in capsys.readouterr().err
    assert "--require-hashes" not in (elsewhere / "calls.txt").read_text().splitlines()[-1]


def test_what_serving_has_is_not_installed_twice(elsewhere: Path) -> None:
    """The packages of the tests are installed beside those of serving, each by one pip."""
    (elsewhere / "pip.py").write_text(RECORDS_CALLS)
    write_locks(elsewhere)
    install.install_packages([sys.executable, "pip.py"], ["base", "dev"], locked=True)
    assert (elsewhere / "dev-only.txt").read_text() == "other==2.0 \\\n    --hash=sha256:00\n"
    calls = (elsewhere / "calls.txt").read_text().splitlines()
    assert sum("--require-hashes" in call for call in calls) == 2
    assert calls[-1].endswith("-e .")


def test_a_package_may_have_a_version_for_each_python(elsewhere: Path) -> None:
    """No version of it is lost on the way from the lock to pip."""
    write_locks(elsewhere)
    older = "split==1.0 ; python_full_version < '3.12' \\\n    --hash=sha256:00\n"
    newer = "split==2.0 ; python_full_version >= '3.12' \\\n    --hash=sha256:00\n"
    (elsewhere / "locks" / "dev.txt").write_text(TINY + older + newer)
    assert install.write_dev_lock().read_text() == older + newer


def test_only_milestones_of_pip_are_told() -> None:
    """Large downloads and the unpacking; the other hundred lines go to the log."""
    assert install.progress("Downloading torch-2.13.0-cp311.whl (190.4 MB)") == "downloading torch (190 MB)"
    assert install.progress("Installing collected packages: a, b, c") == "unpacking 3 package(s)"
    assert install.progress("Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)") == ""
    assert install.progress("Requirement already satisfied: numpy") == ""


def test_a_python_that_is_too_old_is_refused_with_what_to_do(root: Path) -> None:
    """`false` answers as an old Python does: with a code that is not 0."""
    done = subprocess.run(["make", "setup", "PYTHON=false"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make setup PYTHON=" in done.stderr


def test_what_was_installed_is_known_by_what_it_depends_on(tmp_path: Path) -> None:
    """A changed pyproject.toml or constraints.txt means another install; a touched file does not."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "locks").mkdir()
    for name in install.INPUTS:
        (tmp_path / name).write_text(name)
    before = install.fingerprint(tmp_path, "base")
    (tmp_path / "pyproject.toml").touch()
    assert install.fingerprint(tmp_path, "base") == before
    assert install.fingerprint(tmp_path, "dev") != before
    (tmp_path / "constraints.txt").write_text("torch==9")
    assert install.fingerprint(tmp_path, "base") != before
