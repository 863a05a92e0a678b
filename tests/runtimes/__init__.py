"""Runtimes that others write: a third one, beside those of this package."""
