"""Stages -> ONNX files that point into the weight files of the bundle."""

from stagepack.extras import explain_missing_packages

with explain_missing_packages("onnx"):
    from stagepack.roads.onnx.add import AddedOnnx as AddedOnnx
    from stagepack.roads.onnx.add import add_onnx as add_onnx
    from stagepack.roads.onnx.add import add_onnx_to_new_bundle as add_onnx_to_new_bundle
