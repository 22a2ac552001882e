"""The source distribution and the wheel: complete, and usable outside of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, into: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(into)], cwd=source, capture_output=True, text=True, check=True
    )
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source distribution from the tracked files, and the wheel from the source distribution."""
    folder = tmp_path_factory.mktemp("packages")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if name.startswith(("src/", "pyproject.toml", "README.md", "LICENSE")) and (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    source = build("build_sdist", folder / "tree", folder)
    with tarfile.open(source) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return source, build("build_wheel", unpacked, folder)


def test_the_wheel_has_every_file_of_the_package(packages: tuple[Path, Path]) -> None:
    """Native sources, cost data and web pages too."""
    tracked = subprocess.run(["git", "ls-files", "src/baton"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name.removeprefix("src/") for name in tracked.stdout.split() if (ROOT / name).is_file()}
    with zipfile.ZipFile(packages[1]) as wheel:
        names = set(wheel.namelist())
    assert {name for name in wanted - names if not name.endswith("README.md")} == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.deep
def test_the_wheel_serves_from_a_clean_environment(packages: tuple[Path, Path], tmp_path: Path) -> None:
    """The dependencies are those of this environment, the package is that of the wheel, the folder is another one."""
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--no-index", packages[1]], check=True)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    (Path(own.stdout.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def run(*words: str) -> str:
        done = subprocess.run([*words], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import baton.cli; print(baton.cli.__file__)")
    assert where.startswith(str(home))
    run(str(python), "-m", "baton.compute.native.build")
    assert any((tmp_path / "cache").rglob("*.so")), "the native sources are compiled"
    assert run(str(home / "bin" / "baton"), "--version").startswith("baton ")
