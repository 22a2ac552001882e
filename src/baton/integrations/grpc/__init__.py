"""A gRPC server over HTTP/2, for the services of the packages beside it."""
