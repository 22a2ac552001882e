"""vLLM servers as workers: tokens in, tokens out, over vLLM's HTTP interface."""
