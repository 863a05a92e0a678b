"""Stages in processes of their own on one machine or many: the public names of `stagepack_loaders.distributed`."""

from stagepack_loaders.distributed.connect import connect as connect
from stagepack_loaders.distributed.pipeline import DistributedPipeline as DistributedPipeline
from stagepack_loaders.pipeline_sequence import PipelineSequence as PipelineSequence

__all__ = ["DistributedPipeline", "PipelineSequence", "connect"]
