"""What moves bytes: the arena of a host, transports between hosts, stores below the arena, frames between processes."""
