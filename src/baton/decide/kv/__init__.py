"""Metadata of the KV cache, and no bytes: hashes, layouts, blocks, the host pool, the prefix index."""
