"""The rules of the format: the requirements on a manifest and a graph beyond their types.

Each check cites the number of its rule in ``schema/SPEC.md``, and yields every problem and not only the first.
"""

from stagepack.format.validate.example import check_example as check_example
from stagepack.format.validate.folded import check_folded as check_folded
from stagepack.format.validate.graph import check_graph as check_graph
from stagepack.format.validate.graph import zero_bytes as zero_bytes
from stagepack.format.validate.manifest import check_manifest as check_manifest
from stagepack.format.validate.names import DIGEST_PATTERN as DIGEST_PATTERN
from stagepack.format.validate.names import FILE_NAME_PATTERN as FILE_NAME_PATTERN
from stagepack.format.validate.names import INDEX_NAME as INDEX_NAME
from stagepack.format.validate.names import MANIFEST_NAME as MANIFEST_NAME
from stagepack.format.validate.names import MODEL_CONFIG_NAME as MODEL_CONFIG_NAME
from stagepack.format.validate.names import SIGNATURE_NAME as SIGNATURE_NAME
from stagepack.format.validate.names import is_identifier as is_identifier
from stagepack.format.validate.names import is_tensor_name as is_tensor_name
from stagepack.format.validate.onnx import check_onnx as check_onnx
from stagepack.format.validate.problems import format_names as format_names
from stagepack.format.validate.problems import raise_problems as raise_problems
from stagepack.format.validate.stage import EntryPointFacts as EntryPointFacts
from stagepack.format.validate.stage import StageGraph as StageGraph
from stagepack.format.validate.stage import check_stage as check_stage
from stagepack.format.validate.weights import NamedWeights as NamedWeights
from stagepack.format.validate.weights import check_index as check_index
from stagepack.format.validate.weights import check_weights as check_weights
from stagepack.format.validate.weights import weight_bytes as weight_bytes
from stagepack.format.validate.whole_model import check_plan as check_plan
from stagepack.format.validate.whole_model import check_whole_model as check_whole_model
