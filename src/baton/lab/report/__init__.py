"""Render reports: turn records and decision logs into pages, traces and explanations. Pure functions."""
