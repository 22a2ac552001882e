"""A 64-bit ARM machine in user-mode emulation: Debian's Python for ARM under qemu, and a cross compiler as its g++.

The packages are downloaded once, into the user's cache. Programs of this machine that the emulated Python starts, such
as the cross compiler, run without emulation.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "baton" / "peers" / "arm-python-3.11"
EMULATOR, COMPILER = "qemu-aarch64", "aarch64-linux-gnu-g++"
SYSTEM_PACKAGES = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1", "libstdc++6",
    "zlib1g", "libexpat1", "libffi8", "libssl3", "liblzma5", "libbz2-1.0", "libuuid1",
)  # fmt: skip
WHEELS = ("numpy==2.4.6", "msgspec==0.22.0")
APT = """
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
Dir::State::Lists "{0}/lists";
Dir::State::Status "{0}/status";
Dir::Cache "{0}";
"""


@dataclass(frozen=True, slots=True)
class ArmMachine:
    """The emulated machine. `home` keeps the libraries that Baton compiles for it."""

    home: Path

    def python(self, *arguments: str, processor: str = "max") -> str:
        """Run Python, and return its output. Fails if its exit code is not 0. processor: a name of qemu's."""
        packages = [CACHE / "packages", ROOT / "src", ROOT, Path(pytest.__file__).parents[1]]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plug-ins may be compiled for this machine
            "XDG_CACHE_HOME": str(self.home),
            "PATH": f"{self.home}:/usr/bin:/bin",
        }
        command = [EMULATOR, "-cpu", processor, "-L", str(CACHE / "system"), str(CACHE / "system/usr/bin/python3.11")]
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


def arm_machine(home: Path) -> ArmMachine:
    """Return the machine with an empty cache in `home`. Skip the test if a part is missing and cannot be downloaded."""
    missing = [name for name in (EMULATOR, COMPILER) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: apt install qemu-user g++-aarch64-linux-gnu")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with CACHE.with_name("arm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes share the download
        if not CACHE.exists():
            with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
                into = Path(folder) / "arm"
                _install(into)
                into.rename(CACHE)
    (home / "g++").symlink_to(shutil.which(COMPILER) or "")
    return ArmMachine(home)


def _install(into: Path) -> None:
    for name in ("lists/partial", "archives/partial", "system", "packages"):
        (into / name).mkdir(parents=True)
    (into / "status").touch()
    (into / "apt.conf").write_text(APT.format(into))
    for command in (["update"], ["download", *SYSTEM_PACKAGES]):
        _run(["apt-get", "-qq", *command], into / "archives", APT_CONFIG=str(into / "apt.conf"))
    for package in (into / "archives").glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(into / "system")], into)
    shutil.rmtree(into / "archives")
    shutil.rmtree(into / "lists")
    platforms = ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    _run([*pip, *platforms, "--python-version", "3.11", "--target", str(into / "packages"), *WHEELS], into)


def _run(command: list[str], folder: Path, **environment: str) -> None:
    """Run a command, or skip the test if it fails."""
    try:
        subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Python for ARM cannot be downloaded: {getattr(error, 'stderr', error)}")
