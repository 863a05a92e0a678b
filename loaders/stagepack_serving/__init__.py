"""Serve bundles: the Open Inference Protocol, a model server, and model repositories for NVIDIA Triton."""
