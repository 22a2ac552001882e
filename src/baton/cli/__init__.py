"""The `baton` command: one file per sub-command."""
