"""How a pipeline changes while calls go on: it takes other weights, and adapters."""

import dataclasses
from abc import ABC

from stagepack.errors import AdapterError, UpdateError, named_errors
from stagepack.opening import AdapterSource, TrustedSigners
from stagepack_loaders.adapter_changes import AdapterChange, new_adapter
from stagepack_loaders.executor import Executor
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.update_sources import WeightSource, update_source
from stagepack_loaders.versions import UpdateSource, check_weight_version


class PipelineVersions(ABC):
    """The versions of a pipeline.

    Attributes:
        executor: what runs the stages.
        trusted_signers: who must have signed the bundles that it is updated from; None for no check.
    """

    executor: Executor
    trusted_signers: TrustedSigners | None = None

    @property
    def version(self) -> str:
        """The name of the version of the weights that calls and sequences to come run on: the digest of the bundle, or as `update` says."""
        return self.executor.version.name

    def update(
        self,
        source: WeightSource,
        *,
        version: str | None = None,
        keep_previous: bool = False,
        require_signature: TrustedSigners | None = None,
    ) -> UpdateReport:
        """Take the weights of another bundle, or of deltas on the one that runs, while calls go on.

        The new weights are read and verified beside those that run; then calls and sequences to come run on them. Calls and sequences
        under way finish on the version that they began with, whose weights are freed with the last of them: meanwhile, what has changed
        is in memory twice. No call waits. Buffers that calls without a sequence write keep their content; `reset_state` sets them to
        that of the new bundle. Calls of several stages never mix versions. An update waits for another one.

        Args:
            source: the folder of the bundle, its URL, or an opened bundle; with the graphs of the bundle that runs. Or the folder of a
                delta on the bundle that runs, or several of them in order (see `stagepack.delta`): weights that they do not change are
                not read. When 64 deltas make what runs, the next update writes it into the cache, as a bundle that needs none of them.
            version: a name for the version; by default that of the delta, or else the digest of its bundle.
            keep_previous: keep the version before in memory until the next update, which is then instant if it goes back to it.
            require_signature: see `stagepack.load`; by default as at loading.

        Returns:
            The names of the versions, and how long each part took.

        Raises:
            UpdateError: the graphs or the contract are others, or a delta is on another bundle; or weights of a stage were replaced or
                trained, or pass through `device_memory`; or the pipeline has adapters, which are for the weights that run: unload them
                first. The version that runs goes on, as with any other error.
            StagepackError: the bundle cannot be read or verified; see `stagepack.load`.

        Examples:
            >>> pipeline.update("step-2.stagepack", version="step 2").version
            'step 2'
        """
        self.executor.check_open()
        check_weight_version(version)
        report = UpdateReport()
        with report.part("verify"):
            found = update_source(self.executor.bundle, source, require_signature, self.trusted_signers)
        update = dataclasses.replace(found, name=version or found.name, keeps_previous=keep_previous)
        with named_errors(found.bundle.location):
            self.executor.update(update, report)
        return report

    def rollback(self, *, keep_previous: bool = False) -> UpdateReport:
        """Go back to the version before the last update, which was called with ``keep_previous``: its weights are in memory.

        Args:
            keep_previous: keep the version that runs now, to go forward to it again.

        Returns:
            The names of the versions, and how long each part took.

        Raises:
            ClosedError: the pipeline is closed.
            UpdateError: no version is kept, as after a start of lost processes: update to the bundle of the version.
        """
        self.executor.check_open()
        if (kept := self.executor.updated.kept) is None:
            raise UpdateError(
                f"{self.executor.bundle.location}: no version before is kept: update with keep_previous=True, or update to its bundle"
            )
        report = UpdateReport()
        update = UpdateSource(bundle=kept.bundle.stored, name=kept.name, keeps_previous=keep_previous)
        self.executor.update(update, report)
        return report

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that calls to come may choose."""
        return self.executor.version.adapters.names

    def load_adapter(
        self,
        adapter: AdapterSource,
        name: str | None = None,
        *,
        replace: bool = False,
        require_signature: TrustedSigners | None = None,
    ) -> str:
        """Take one more adapter while calls go on.

        All stages read what changes their weights, in all processes, before the first call may name the adapter; if one fails, none has
        it. No call waits, and calls and sequences under way go on with the adapters that they began with. The pipeline was loaded with
        ``adapters``, which may be an empty list.

        Args:
            adapter: an adapter that ``stagepack adapter`` wrote for the bundle that runs: see `adapters` of `stagepack.load`.
            name: its name in calls; by default the last part of the folder.
            replace: let it take the place of an adapter of its name. Calls and sequences under way finish with the one before.
            require_signature: see `stagepack.load`; by default as at loading.

        Returns:
            Its name.

        Raises:
            AdapterError: the adapter is of another bundle, or does not fit it; an adapter of its name is loaded; or the pipeline takes
                none.
            OptionError: the name is malformed.
            SignatureError: a signature is required that it does not have.
            StagepackError: the adapter cannot be read, or a process is lost.

        Examples:
            >>> pipeline = stagepack.load("llama.stagepack", adapters=[])
            >>> pipeline.load_adapter("./pirate")
            'pirate'
            >>> tokens = pipeline.generate(prompt, adapter="pirate")
            >>> pipeline.unload_adapter("pirate")
        """
        self.executor.check_open()
        signers = require_signature or self.trusted_signers
        change = new_adapter(self.executor.bundle, adapter, name, replaces=replace, require_signature=signers)
        assert change.adapter is not None
        with named_errors(change.adapter.location):
            self.executor.update(change, UpdateReport())
        return change.name

    def unload_adapter(self, name: str) -> None:
        """Let an adapter go: calls and sequences to come cannot name it. Its memory is free when the last one under way has ended.

        Args:
            name: its name.

        Raises:
            AdapterError: no adapter of this name is loaded.
            StageLostError: a process is lost.
        """
        self.executor.check_open()
        if not isinstance(name, str):
            raise AdapterError(f"expected the name of an adapter, found {type(name).__name__}: {name!r:.80}")
        self.executor.update(AdapterChange(name=name), UpdateReport())
