"""Policies of published systems, for comparison. The server imports one only if its configuration names it."""
