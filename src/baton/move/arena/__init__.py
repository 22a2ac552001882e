"""Memory of a host's KV blocks, mapped by all of its processes: a memfd, or device memory exported by CUDA IPC."""
