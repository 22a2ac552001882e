"""Bytes between the arenas of hosts: one port, several transports."""
