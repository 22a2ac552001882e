"""Servers of other inference engines as workers: what does not depend on the engine."""
