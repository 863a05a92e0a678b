"""What the export makes of models that write or embed texts."""
