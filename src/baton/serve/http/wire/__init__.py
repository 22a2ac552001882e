"""Bodies of requests and responses: their types, parsing and encoding, and the OpenAPI document."""
