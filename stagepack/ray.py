"""Stages in actors of Ray: the public names of `stagepack_loaders.distributed.ray_launcher`. Needs the extra ``ray``."""

from stagepack.extras import explain_missing_packages

with explain_missing_packages("ray"):
    from stagepack_loaders.distributed.ray_launcher import launch as launch

__all__ = ["launch"]
