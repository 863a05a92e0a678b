"""Routes of OpenAI's API."""
