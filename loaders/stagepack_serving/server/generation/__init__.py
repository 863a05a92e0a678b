"""Generation over the server: models that continue a text or translate an input, token by token."""
