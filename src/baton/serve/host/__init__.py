"""Parts of one host: arena, worker processes, the mover process that copies KV, and the agent that joins a server."""
