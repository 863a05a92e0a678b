"""A runtime that interprets graphs with numpy: an example of a runtime that is not part of stagepack."""
