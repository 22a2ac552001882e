"""How long a step, a handoff, a load takes. One model for policies, planner and simulator."""
