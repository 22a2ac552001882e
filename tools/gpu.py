"""Run what needs CUDA: tests marked `gpu`, then benchmarks/gpu*.py. Without CUDA, say what is missing and end with 0.

`make setup` is not needed before: on a machine whose own Python brings PyTorch with CUDA, `pip install --no-deps -e .`
into that Python is enough. The first Python that has all it takes is used: the one that runs this file, then .venv's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import importlib.util, sys
missing = [name for name in ("torch", "baton", "msgspec", "pytest") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("it has no " + ", ".join(missing))
import torch
if not torch.cuda.is_available():
    sys.exit(f"its torch {torch.__version__} finds no CUDA device")
print(f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
"""


def usable(python: str) -> bool:
    """Say what this Python has, or why it will not do."""
    if not Path(python).exists():
        print(f"gpu: {python}: not there")
        return False
    probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    words = (probe.stdout or probe.stderr).strip().splitlines()
    print(f"gpu: {python}: {words[-1] if words else 'ended without a word'}", flush=True)
    return probe.returncode == 0


def main() -> int:
    candidates = [sys.executable, str(ROOT / ".venv" / "bin" / "python")]
    python = next((candidate for candidate in candidates if usable(candidate)), None)
    if python is None:
        print("gpu: nothing was run. Where the machine's own Python has PyTorch with CUDA: pip install --no-deps -e .")
        return 0
    commands = [[python, "-m", "pytest", "-m", "gpu", "tests"]]
    commands += [[python, str(path)] for path in sorted((ROOT / "benchmarks").glob("gpu*.py"))]
    codes = []
    for command in commands:
        print("gpu: $ " + " ".join(command), flush=True)
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    no_tests = 5  # pytest's code when it collected none
    return 1 if any(codes[1:]) or codes[0] not in (0, no_tests) else 0


if __name__ == "__main__":
    sys.exit(main())
