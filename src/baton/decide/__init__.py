"""The deciding half: pure state machines, policies and cost models. No I/O, no clock, no random numbers."""
