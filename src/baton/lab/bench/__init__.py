"""The load generator behind `baton bench`: measures any server that speaks OpenAI's API, ours or a peer."""
