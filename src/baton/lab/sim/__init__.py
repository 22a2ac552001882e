"""The simulator: the deciding half as it is, on virtual time. See docs/simulator.md."""
