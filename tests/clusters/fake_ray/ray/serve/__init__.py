"""Ray Serve, as far as the example of a server class needs it."""
