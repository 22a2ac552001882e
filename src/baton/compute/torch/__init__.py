"""The PyTorch engine: the forward pass of a decoder over paged KV, on a CPU or a GPU."""
