"""Pure choices, one family a file. A policy draws no numbers, reads no clock, logs nothing."""
