"""A bundle as the Open Inference Protocol describes it: https://github.com/kserve/open-inference-protocol."""
