"""What is measured: the Prometheus metrics as data and their recorder; the results of a run. Reads no clock."""
