"""The live driver: it feeds the deciding half with events of clients and workers, and carries out its commands."""
