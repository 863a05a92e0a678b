"""Bundles are trained in real processes."""
