"""Offline planner: search over hardware, roles, parallelism and precision, then check the best fleets by simulation."""
