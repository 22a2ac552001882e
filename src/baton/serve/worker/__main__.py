"""`python -m baton.serve.worker FD`: how the server starts a worker process. Not meant to be typed."""

from __future__ import annotations

import sys

from baton.serve.worker.process import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(int(sys.argv[1])))
