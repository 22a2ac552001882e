"""Policies of published systems, for comparison. `policy.name` and short names find them; the server imports none."""
