"""Run every benchmark of benchmarks/ that needs no accelerator, one after the other: `bench.py [NAME ...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def benchmarks(names: list[str]) -> list[Path]:
    """Programs in benchmarks/, in alphabetical order; files that start with `_` or `gpu` are none of ours."""
    programs = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith(("_", "gpu")))
    return [path for path in programs if not names or path.stem in names]


def main(names: list[str]) -> int:
    programs = benchmarks(names)
    if not programs:
        print(f"no benchmark named {', '.join(names)} in benchmarks/" if names else "benchmarks/ holds no program yet")
        return 1 if names else 0
    failed = []
    for path in programs:
        print(f"== {path.relative_to(ROOT)}", flush=True)
        if subprocess.run([sys.executable, str(path)], cwd=ROOT, check=False).returncode != 0:
            failed.append(path.stem)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
