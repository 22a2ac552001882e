"""Triton kernels for the torch engine on GPUs."""
