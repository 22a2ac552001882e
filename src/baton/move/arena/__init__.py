"""The bytes of a host's KV cache."""
