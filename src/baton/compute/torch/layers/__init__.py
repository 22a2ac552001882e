"""The decoder, and the kinds of attention and MLP that its layers may have."""
