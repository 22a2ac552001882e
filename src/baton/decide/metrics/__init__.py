"""The Prometheus metrics of Baton, as data."""
