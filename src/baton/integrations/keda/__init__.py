"""KEDA scales the hosts of a server by the targets of its scaling policy."""
