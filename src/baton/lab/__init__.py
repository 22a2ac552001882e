"""The laboratory: workloads, the simulator, the planner, reports, and the load generator of `baton bench`."""
