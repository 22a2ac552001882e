"""LMCache: its remote storage in a store of Baton."""
