"""Stages as sessions of ONNX Runtime. Imports no torch."""
