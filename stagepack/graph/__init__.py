"""What is computed from a graph: traversal results, aliasing, repeated regions, joining. Nothing in here imports torch."""
