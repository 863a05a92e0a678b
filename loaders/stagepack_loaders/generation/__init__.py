"""Generation: the calls of a decoder that continue a text or translate an input, token by token."""
