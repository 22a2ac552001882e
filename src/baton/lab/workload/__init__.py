"""Workloads: traces from files, arrivals and lengths from distributions, and prompts for both. Sends nothing."""
