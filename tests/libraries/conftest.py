"""torchvision, before a test module imports transformers, which imports torchvision where it is installed."""

import tests.libraries.torchvision_operators  # noqa: F401
