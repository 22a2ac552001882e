"""vLLM servers as workers. Requests and outputs are token ids, sent over vLLM's HTTP interface."""
