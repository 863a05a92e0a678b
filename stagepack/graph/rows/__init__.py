"""Whether a model keeps the rows of a batch apart: see `stagepack.graph.rows.row_analysis`."""
