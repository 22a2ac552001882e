"""The HTTP edge: routes, request bodies, answers and errors in the shapes that clients know."""
