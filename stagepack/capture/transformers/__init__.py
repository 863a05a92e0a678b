"""Models of transformers and sentence-transformers: their folders, example inputs, and modules that generate."""
