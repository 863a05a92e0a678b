"""A bundle as a model repository of NVIDIA Triton, and the models that run in Triton's Python backend."""
