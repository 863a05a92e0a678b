"""The calls of a decoder that continue texts, token by token."""
