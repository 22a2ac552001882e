"""The interface of Ray Serve for language models."""
