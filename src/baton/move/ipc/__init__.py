"""Sockets and shared memory between processes: frames, streams, listeners, and lent memory files."""
