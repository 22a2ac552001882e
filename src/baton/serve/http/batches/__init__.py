"""OpenAI's files and batches: work without a deadline, which runs at low priority and survives a restart."""
