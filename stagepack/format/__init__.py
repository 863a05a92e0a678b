"""The bundle format: its types, codec, rules, reader and writer. No module of this package imports torch."""
