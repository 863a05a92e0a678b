"""Processes that begin with torch and the loaders imported, which saves seconds a process. They are processes like all others."""

import multiprocessing

# All tests of a pytest process share one fork server, so it imports what any of them needs.
_PRELOADED_MODULES = [
    "stagepack_loaders.distributed.process_program",
    "stagepack_loaders.torch.runtime",
    "stagepack_loaders.torch.prepare",
    "stagepack_loaders.train.start",
    "torch._dynamo",
    "torch.distributed.checkpoint",
]

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(_PRELOADED_MODULES)
