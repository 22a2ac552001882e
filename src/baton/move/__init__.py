"""Moving bytes: arenas of KV blocks, transports between arenas, stores for tiers, and sockets between processes."""
