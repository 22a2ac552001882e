"""Engines to compare with, each in a process (and a virtual environment) of its own; see benchmarks/engines.py."""
