"""A worker process: it receives commands, runs steps on one engine, and reports their results."""
