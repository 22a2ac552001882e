"""Fetch the wheels that `make gpu` needs on a machine with PyTorch and without a network (`make gpu-pack`).

The wheels are put into .gpu-pack, which git ignores: copy that folder with the checkout. `make gpu` unpacks it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / ".gpu-pack"
NAMES = ROOT / "tools" / "gpu_pack.txt"
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
PACK_BYTES_MAX = 60 << 20
"""The checkout and the pack are copied together, and the machine may accept 64 MiB only."""


class PackError(Exception):
    """The pack cannot be used. The message says what to do."""


def fetch(pack: Path) -> None:
    """Download the wheels into an empty folder."""
    shutil.rmtree(pack, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", PYTHON, "--dest", str(pack), "--requirement", str(NAMES)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    if subprocess.run(command, check=False).returncode:
        raise PackError("pip could not download the wheels; its output is above")
    check_size(pack)


def check_size(pack: Path) -> int:
    """Return the bytes of the pack. Raises PackError if they exceed the limit."""
    size_bytes = sum(wheel.stat().st_size for wheel in pack.glob("*.whl"))
    if size_bytes > PACK_BYTES_MAX:
        raise PackError(
            f"{pack} takes {size_bytes / 2**20:.0f} MiB, and {PACK_BYTES_MAX >> 20} are allowed; "
            f"remove names from {NAMES.name}"
        )
    return size_bytes


def unpack(pack: Path, site: Path) -> None:
    """Extract the wheels, and write Baton's package metadata, so that its version is known without an install."""
    for wheel in sorted(pack.glob("*.whl")):
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(site)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    described = site / f"{project['name']}-{project['version']}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (described / "METADATA").write_text(text, encoding="utf-8")


def main() -> int:
    try:
        fetch(PACK)
    except PackError as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    wheels = len(list(PACK.glob("*.whl")))
    print(f"gpu-pack: {wheels} wheels, {check_size(PACK) / 2**20:.0f} MiB, in {PACK.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
