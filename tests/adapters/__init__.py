"""Adapters of bundles, made of files as peft writes them."""
