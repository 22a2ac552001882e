"""What to buy and how to cut it: search over hardware, roles, parallelism and precision, verified by simulation."""
