"""Cost models: durations of steps and handoffs, for policies, planner and simulator."""
