"""Choose where to cut a graph, and cut it. Nothing in here imports torch."""
