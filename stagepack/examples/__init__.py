"""Small models that the guides export."""
