"""What one host runs: its arena, its worker processes, and what moves its KV bytes."""
