"""An endpoint picker: Baton's routing for servers behind an Envoy proxy."""
