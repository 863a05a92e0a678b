"""Run bundles: everything in here reads a bundle and knows nothing of how it was made."""
