"""Generation and embeddings behind the server: the generate extension, and the API of OpenAI: an extension of stagepack."""

from typing import Final

from stagepack.extensions import Extension

EXTENSION: Final = Extension(server=("stagepack_serving.server.generation.text_extension", "SERVER"))
