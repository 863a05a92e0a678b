"""Models of transformers and diffusers: their folders and example inputs."""
