"""Engines to compare with, each in a separate process and virtual environment; see benchmarks/engines.py."""
