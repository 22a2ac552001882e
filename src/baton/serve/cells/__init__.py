"""A router over several servers, the cells of a fleet."""
