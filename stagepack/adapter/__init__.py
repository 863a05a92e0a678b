"""Adapters: low-rank changes of the weights of a bundle, a document of their own, and the graph that applies them."""
