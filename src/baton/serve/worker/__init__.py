"""A worker process: it maps the host's arena, loads the model and steps until the server hangs up."""
