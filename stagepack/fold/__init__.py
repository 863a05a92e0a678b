"""Equal parts of a graph -> one region, called many times."""

from stagepack.fold.find import find as find
from stagepack.fold.find import insides as insides
from stagepack.fold.regions import fold as fold
