"""Write the bundle of a model of the zoo: ``python -m tools.fuzz_bundle_export MODEL OUT``."""

import sys
from pathlib import Path

from stagepack.errors import CutError
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests.zoo.cases import named

if __name__ == "__main__":
    [case] = named(sys.argv[1])
    capture = case.capture()
    for stages in (3, 2, 1):
        try:
            export_capture(capture, out=Path(sys.argv[2]), cut_options=CutOptions(stages=stages))
            break
        except CutError:
            continue
