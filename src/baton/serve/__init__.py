"""The serving processes: the HTTP server, the live driver of the cluster's decisions, hosts, and worker processes."""
