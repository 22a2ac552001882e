"""Other engines and clusters behind Baton. Each integration is imported only where the configuration asks for it."""
