"""The seed campaign: drawn scenarios, with faults, under checkers of the invariants."""
