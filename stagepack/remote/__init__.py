"""Bundles at a URL: their files are downloaded into a cache when they are needed, and checked chunk by chunk."""
