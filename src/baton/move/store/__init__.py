"""Stores: one tier's KV blocks by their hash, in files, on pool nodes, in Redis or in an object store."""
