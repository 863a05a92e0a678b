"""`ExportedProgram` -> `Graph`: the only place on the writing side that knows torch.fx."""

from stagepack.linearize.program import Linearized as Linearized
from stagepack.linearize.program import linearize as linearize
