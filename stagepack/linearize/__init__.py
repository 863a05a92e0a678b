"""`ExportedProgram` -> `Graph`: the only place on the writing side that knows torch.fx."""

from stagepack.linearize.program import LinearizedProgram as LinearizedProgram
from stagepack.linearize.program import linearize_program as linearize_program
