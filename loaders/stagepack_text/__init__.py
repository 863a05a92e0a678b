"""Texts from decoders and embeddings of texts, from the export to the server: an extension of stagepack."""

from typing import Final

from stagepack.extensions import Extension

EXTENSION: Final = Extension(
    pipeline_methods={
        "encode": ("stagepack_text.embeddings", "encode"),
        "generate": ("stagepack_text.generate", "generate"),
    },
    export_options={"generate": ("stagepack_text.export.generation", "generating_model")},
    source=("stagepack_text.export.sentence_source", "SOURCE"),
    server=("stagepack_text.server_extension", "SERVER"),
)
