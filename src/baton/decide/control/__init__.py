"""State machines without I/O: the coordinator of a cluster and the batcher of one worker."""
