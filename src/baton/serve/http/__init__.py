"""The HTTP server: routes, request bodies, responses and errors of the OpenAI API and Baton's own routes."""
