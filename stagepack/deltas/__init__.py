"""Deltas: what changes a bundle into its next version, as a folder of its own. No torch."""
