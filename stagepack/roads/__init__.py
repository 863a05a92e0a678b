"""The ways of a model to a bundle, and of bundles to others: one file for each, read from top to bottom."""
