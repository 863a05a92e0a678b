"""For processes of stages that import it: values go from process to process as between devices, by gloo, however small they are."""

import os

from stagepack_loaders.distributed import routes

os.environ["STAGEPACK_NCCL"] = "gloo"
routes._INLINE_BYTES = 0
