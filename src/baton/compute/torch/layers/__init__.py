"""Models as data flow: a decoder of layers, and the kinds of attention and of MLP that a layer may have."""
