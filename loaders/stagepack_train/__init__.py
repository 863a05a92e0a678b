"""The stages of a bundle, trained by the schedules of torch.distributed.pipelining: an extension of stagepack."""

from typing import Final

from stagepack.extensions import Extension

EXTENSION: Final = Extension(public_names={"train": ("stagepack_train.start", "train")})
