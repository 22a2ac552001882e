"""Messages between the server, host agents, movers and worker processes."""
