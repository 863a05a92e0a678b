"""A bundle as the Open Inference Protocol shows it: https://github.com/kserve/open-inference-protocol."""
