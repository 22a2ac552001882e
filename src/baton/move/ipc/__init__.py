"""Frames and sockets between processes, and memory that processes of one machine share."""
