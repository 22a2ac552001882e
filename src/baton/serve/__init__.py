"""The serving processes: HTTP at the edge, the live driver of the deciding half, hosts, and worker processes."""
