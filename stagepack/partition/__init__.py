"""Where to cut a graph, and the cut itself. Nothing in here imports torch."""
