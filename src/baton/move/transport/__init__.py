"""Transports: pull KV bytes from the arena of one host into that of another, under a lease."""
