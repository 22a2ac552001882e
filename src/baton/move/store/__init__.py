"""Tiers below the arena: KV blocks by their hash, in files or on other machines."""
