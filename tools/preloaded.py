"""What the fork server imports for its processes, which saves seconds each.

Without the garbage collector, which takes a fifth of the time of the imports; it passes over none of them in the processes.
"""

import gc
import importlib

# The first export of a process takes 3 s without the modules of torch at the end, which torch imports when it exports.
_MODULES = [
    "stagepack.cli.serve_command",
    "stagepack.roads.export",
    "stagepack.capture.entry_points",
    "stagepack.roads.self_check",
    "stagepack_loaders.distributed.stage_process",
    "stagepack_loaders.load",
    "stagepack_loaders.torch.prepare",
    "stagepack_loaders.torch.runtime",
    "stagepack_loaders.torch.stage",
    "stagepack_serving.server.server",
    "stagepack_train.start",
    "torch.distributed.checkpoint",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "networkx",
    "sympy.plotting",
    "sympy.tensor.tensor",
]

gc.disable()
for _module in _MODULES:
    importlib.import_module(_module)
gc.freeze()
gc.enable()
