"""Bodies of requests and answers: their types, how they are read and checked, and the OpenAPI document."""
