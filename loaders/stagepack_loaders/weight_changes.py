"""Which weights of a bundle differ from those of a running one: the others are in memory already."""

from stagepack.format.reader import Bundle


class WeightChanges:
    """The weights in which a bundle differs from the bundle that runs, whose graphs are the same."""

    def __init__(self, running: Bundle, bundle: Bundle) -> None:
        # Files that were edited on purpose have another content than the manifest says.
        compares = running.compares_digests and bundle.compares_digests
        self._equal_files = {
            file_name
            for stage in bundle.stages
            for file_name in stage.weights
            if compares
            and file_name in running.files
            and running.files[file_name].blake3 == bundle.files[file_name].blake3
        }

    def is_changed(self, file_name: str, tensor_name: str) -> bool:
        """Whether a stored tensor is another one than in the bundle that runs."""
        return file_name not in self._equal_files
