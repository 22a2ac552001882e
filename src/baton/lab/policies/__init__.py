"""Policies of published systems, for comparison. The server imports one only if a configuration names it."""
