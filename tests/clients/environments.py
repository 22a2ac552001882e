"""Environments of third-party clients: one for each, kept between runs, outside of the repository."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CACHE = Path.home() / ".cache" / "baton" / "clients"
RUN_S = 900


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment with one client."""

    folder: Path

    def run(
        self, *command: str | Path, variables: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end. Returns its result, with the output as text."""
        program = self.folder / "bin" / command[0]
        words = [str(program), *map(str, command[1:])]
        environment = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder),
            **OFFLINE,
            **(variables or {}),
        }
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=RUN_S, env=environment, cwd=cwd
        )

    def answer(self, script: str, *arguments: str, variables: dict[str, str] | None = None) -> Any:
        """Run a script, and return the JSON of its last line. Fails with its output if it fails."""
        done = self.run("python", "-W", "ignore", "-c", script, *arguments, variables=variables)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
    "NO_PROXY": "*",
}
"""Variables of every client: it loads nothing from a hub."""


def installed(name: str, *requirements: str) -> Environment:
    """Return the environment `name`. Installs the packages once; skips the test if that is not possible."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder, wanted = CACHE / name, "\n".join(requirements)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "installed.txt"
        if not (stamp.exists() and stamp.read_text() == wanted):
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot install {name}: {done.stderr.strip()[-200:]}")
            stamp.write_text(wanted)
    return Environment(folder)
