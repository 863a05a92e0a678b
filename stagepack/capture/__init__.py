"""A module, a ``.pt2`` file or a Hugging Face model -> a captured model. The only place that runs the code of a user."""
