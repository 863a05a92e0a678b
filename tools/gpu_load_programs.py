"""What `tools.bench_gpu_load` times: each program loads the same weight file in a process of its own and prints the seconds."""

from typing import Final

# sys.argv: the folder of the bundle, the device.
PRELUDE: Final = """
import json, sys, time, torch
bundle, device = sys.argv[1], torch.device(sys.argv[2])
device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
weights = f"{bundle}/stage-0.safetensors"
torch.ones(1, device=device) + 1

def timed(load):
    started = time.perf_counter()
    loaded = load()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps(time.perf_counter() - started))
"""

# Page-locked memory to the device, in pieces of 256 MiB: the fastest that any loader could be.
COPY_LIMIT: Final = """
import os
size, piece = os.path.getsize(weights), 2**28
source = torch.ones(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
target = torch.empty(size, dtype=torch.uint8, device=device)

def copy():
    for start in range(0, size, piece):
        part = target[start : start + piece]
        part.copy_(source[: len(part)], non_blocking=True)

copy()
timed(copy)
"""

_STAGEPACK = """
import blake3, stagepack, stagepack_loaders.load, stagepack_loaders.torch.prepare
timed(lambda: stagepack.load_stage(bundle, 0, device=device, verify="{verify}"))
"""
LOADERS: Final = {
    "stagepack": _STAGEPACK.format(verify="full"),
    "stagepack, weights not verified": _STAGEPACK.format(verify="manifest"),
    # What a GPU is loaded with by default; on the CPU, the same code without page-locked memory.
    "stagepack, stream": """
import blake3, stagepack, stagepack_loaders.load, stagepack_loaders.torch.prepare

def load():
    stage = stagepack.load_stage(bundle, 0, device=device, stream=True)
    stage.wait_for_weights()
    return stage

timed(load)
""",
    "safetensors load_file": """
from safetensors.torch import load_file
timed(lambda: load_file(weights, device=str(device)))
""",
    "safetensors prefetch": """
from safetensors import safe_open

def load():
    with safe_open(weights, framework="pt", device=str(device)) as file:
        return dict(file.prefetch())

timed(load)
""",
    "run:ai streamer": """
from runai_model_streamer import SafetensorsStreamer

def load():
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(weights, device=str(device))
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}

timed(load)
""",
    "fastsafetensors": """
from fastsafetensors import fastsafe_open

def load():
    with fastsafe_open(weights, framework="pt", device=str(device), nogds=True) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}

timed(load)
""",
    "InstantTensor, buffered": """
from instanttensor import BackendPolicy, safe_open

def load():
    with safe_open(weights, framework="pt", device=device, backend=BackendPolicy.BUFFERED) as file:
        return dict(file.tensors())

timed(load)
""",
}
