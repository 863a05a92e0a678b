"""What users of `torch.nn.Module` look for in a pipeline, and what takes its place."""

import sys

FIXED_DTYPES = "a bundle computes in the types of the export: export with --dtype, or in Python the model in that type"
_TRAINING = "graphs compute as the model did at the export: export it in training mode, and train with stagepack.train"
_MODULE_METHODS = {
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), FIXED_DTYPES),
    **dict.fromkeys(("cuda", "cpu"), "move the stages with to(), such as to('cuda') or to(['cuda:0', 'cuda:1'])"),
    "compile": "load the bundle with compile=True",
    **dict.fromkeys(("train", "training"), _TRAINING),
    **dict.fromkeys(
        ("named_parameters", "buffers", "named_buffers"),
        "state_dict() has the weights of all stages by their names in the model",
    ),
    "load_state_dict": "load into each stage, pipeline.stages[0].load_state_dict(weights, strict=False), or export with --graph-from",
    "zero_grad": "an optimizer has it: torch.optim.SGD(pipeline.parameters(), lr).zero_grad()",
    "forward": "call the pipeline itself, as the model is called",
    "device": "its stages have one each: pipeline.devices",
    "dtype": "its inputs have one each: pipeline.inputs[0].dtype",
    "config": "the bundle has that of a transformers model: pipeline.bundle.read('config.json')",
    **dict.fromkeys(
        ("save", "save_pretrained", "push_to_hub"),
        "stagepack.save(pipeline, out=...) writes a bundle; 'stagepack push' uploads it",
    ),
}


def module_hint(attribute_name: str) -> str:
    """Return what takes the place of an attribute of `torch.nn.Module`; nothing for others."""
    torch = sys.modules.get("torch")
    if attribute_name in _MODULE_METHODS or torch is None or attribute_name.startswith("_"):
        return _MODULE_METHODS.get(attribute_name, "")
    is_of_modules = hasattr(torch.nn.Module, attribute_name)
    return f"each of its stages is a module in PyTorch: pipeline.stages[0].{attribute_name}" if is_of_modules else ""
