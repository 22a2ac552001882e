"""The pieces of a forward pass that have more than one implementation: linear layers and attention over paged KV."""
