"""What is computed from a graph: traversal results, repeated regions, joining. Nothing in here imports torch."""
