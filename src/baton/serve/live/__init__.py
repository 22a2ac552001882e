"""The live driver: it passes events of clients and workers to the state machines of `decide`, and runs the commands."""
