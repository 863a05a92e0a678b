"""Stages as torch modules."""
