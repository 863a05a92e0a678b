"""Whether Triton can batch requests to a bundle."""

from stagepack.format.reader import Bundle
from stagepack.graph.rows.batch import batch_dimension
from stagepack_serving.protocol.interface import Interface


def batching_obstacle(bundle: Bundle) -> str:
    """Find out why Triton cannot batch requests to a bundle.

    Triton requires a dimension besides the batch dimension in every tensor. The configuration could add one by ``reshape``, but then
    clients would have to send it.

    The result is the reason; empty if Triton can batch requests.
    """
    dimension = batch_dimension(bundle, bundle.edges)
    if isinstance(dimension, str):
        return dimension
    interface = Interface(bundle.entry_point)
    for tensor in (*interface.inputs.values(), *interface.outputs.values()):
        if len(tensor.shape) == 1:
            return f"{tensor.name} has no dimension besides the batch dimension, which Triton requires"
    return ""
