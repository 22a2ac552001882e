"""`python -m baton.compute.sandbox FD`: entry point of a fork server, started by `baton.compute.sandbox.process`."""

from __future__ import annotations

import sys

from baton.compute.sandbox.fork_server import run_fork_server

if __name__ == "__main__":
    sys.exit(run_fork_server(int(sys.argv[1])))
