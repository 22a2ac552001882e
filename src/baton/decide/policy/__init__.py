"""Policies: pure choices, one family per module. A policy draws no random numbers, reads no clock and writes no log."""
