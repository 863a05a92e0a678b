"""A script of a user, run on each host: calls the pipeline with inputs from a file and writes its answers to another one.

With ``--until-lost``, it then calls until a process is lost, and prints when and why.
"""

import json
import os
import sys
import time

import torch
from safetensors.torch import load_file, save_file

from stagepack.distributed import DistributedPipeline, connect
from stagepack.errors import StageLostError, StagepackError

_LOST_STATUS = 3


def main(bundle: str, calls_file: str, answers_file: str, *flags: str) -> None:
    torch.set_num_threads(1)
    pipeline = connect(bundle, start_seconds=float(os.environ.get("START_SECONDS", "30")))
    if pipeline is None:
        return
    with pipeline:
        calls = [ids for _, ids in sorted(load_file(calls_file).items())]
        answers = [answer.result() for answer in [pipeline.submit(ids) for ids in calls]]
        save_file({f"{number:03}": answer.contiguous() for number, answer in enumerate(answers)}, answers_file)
        facts = {facts.stage: [facts.host, *facts.files] for facts in pipeline.stage_facts}
        _print_line(facts)
        if flags:
            _print_line(_call_until_lost(pipeline, calls[0]))
            sys.exit(_LOST_STATUS)  # torchrun starts all processes again


def _print_line(facts: object) -> None:
    sys.stdout.write(f"{json.dumps(facts)}\n")
    sys.stdout.flush()


def _call_until_lost(pipeline: DistributedPipeline, ids: torch.Tensor) -> dict[str, object]:
    while True:
        try:
            pipeline.submit(ids).result(timeout=20)
        except StageLostError as error:
            return {"time": time.monotonic(), "stages": error.stages, "host": error.host, "error": str(error)}


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StagepackError as error:
        sys.exit(f"{type(error).__name__}: {error}")
