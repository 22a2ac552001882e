"""What a server and a worker process say to each other, and how it is framed."""
