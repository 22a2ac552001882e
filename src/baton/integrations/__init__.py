"""Other inference engines as Baton's workers. An integration is imported only if the configuration uses it."""
