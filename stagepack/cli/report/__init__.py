"""The HTML page that `stagepack report` writes."""
