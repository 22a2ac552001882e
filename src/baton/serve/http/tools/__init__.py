"""Tool calls in chat: put tools into the prompt, constrain calls by a grammar, and parse calls from the output."""
