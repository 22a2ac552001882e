"""Tool calls in chat: how a model is told about tools, how it writes a call, and how a call is read from its text."""
