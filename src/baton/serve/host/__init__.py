"""One host: its arena, the supervisors of its worker and mover processes, the mover, and the joining agent."""
