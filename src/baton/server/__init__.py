"""The server process: HTTP at the edge, the coordinator and the host pool inside, worker processes below."""
