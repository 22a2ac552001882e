"""`python -m baton.serve.worker FD`: entry point of a worker process, started by its host."""

from __future__ import annotations

import sys

from baton.serve.worker.process import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(int(sys.argv[1])))
