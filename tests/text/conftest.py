"""Bundles that generate, each made once for all tests of a folder."""

from tests.serve.conftest import qwen as qwen
from tests.serve.conftest import writer as writer
