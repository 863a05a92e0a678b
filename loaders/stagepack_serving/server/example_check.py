"""The recorded example of a bundle, run before the bundle is served."""

from stagepack.format.reader import Bundle
from stagepack_loaders import example
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_serving.server.errors import ExampleError


def run_example(pipeline: CallablePipeline, bundle: Bundle, *, check: bool) -> None:
    """Run the recorded example, and compare its results with the recorded ones."""
    inputs, expected_results = example.read_example(pipeline, bundle)
    results = example.run_on_inputs(pipeline, inputs)
    difference, is_within = example.compare_results(pipeline, results, expected_results)
    pipeline.reset_state()
    if check and not is_within:
        raise ExampleError(
            f"{bundle.location}: expected the results that are recorded in its example, found a difference of {difference:g}: "
            "the bundle is damaged, or this device computes otherwise (--no-check-example serves it nevertheless)"
        )
