"""Models of transformers and diffusers: their folders, example inputs, and modules that generate."""
