"""A bundle as a model repository of NVIDIA Triton, and what runs in its Python backend."""
