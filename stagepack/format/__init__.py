"""The bundle format: types, codec and rules. Nothing in here imports torch."""
