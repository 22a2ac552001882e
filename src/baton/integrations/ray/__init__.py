"""Ray starts and watches the hosts of a server. Their data does not pass through Ray."""
