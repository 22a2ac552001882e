"""Processes with bounds on time, memory and stack, for foreign code on foreign input: grammars and chat templates."""
