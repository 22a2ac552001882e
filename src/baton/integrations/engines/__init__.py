"""Run servers of other inference engines as workers: the parts that all engines share."""
