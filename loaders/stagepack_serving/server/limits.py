"""The limits of a server, and the versions that it serves, which its operator sets."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

from stagepack.options import Option

# The body of a request for a text. Room for the longest prompts: 30 s of speech in 128 bands are 8 MB of JSON.
MAX_TEXT_BYTES: Final = 16_000_000

_LEAST_SENDING_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """The versions of each model that a server serves: certain ones, or the newest ones; all of them without either."""

    newest_count: int | None = None
    specific: frozenset[int] = frozenset()

    def choose(self, versions: Iterable[int]) -> list[int]:
        """Return the versions to serve, the newest last."""
        ordered = sorted(versions)
        if self.specific:
            return [version for version in ordered if version in self.specific]
        return ordered[-(self.newest_count or len(ordered)) :]

    def __str__(self) -> str:
        """The policy as the command line has it."""
        if self.specific:
            return f"specific:{','.join(map(str, sorted(self.specific)))}"
        return "all" if self.newest_count is None else f"latest:{self.newest_count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server, or of each model that it serves.

    Attributes:
        max_batch_size: the largest batch that requests to a model are joined to, and the largest number of texts that a model generates at
            once; 1 runs each request alone.
        batching_delay: the time that a request waits for others to join its batch, in seconds.
        max_pending_requests: the number of requests to a model that are accepted and not answered yet.
        max_connections: the number of open HTTP connections, of open gRPC connections, and of gRPC requests at a time.
        first_request: the time that a connection has for its TLS handshake, and then for the head of its first request (in gRPC, for the
            preface of HTTP/2), in seconds; the head of a later request has the same time from its first byte.
        max_request_bytes: the size of a request, both as received and decompressed, in bytes.
        deadline: the time from the head of a request to its answer, in seconds; and again, or 5 s, from the first byte of the answer to the
            last.
        max_waiting_tokens: the number of tokens of prompts that wait for a model to begin with their texts.
        max_sequences: the number of sequences whose state a model keeps.
        sequence_idle: the time without requests after which a sequence may be evicted for a new one, in seconds.
        linger: the time after SIGTERM or SIGHUP in which the server still accepts requests, in seconds: load balancers need it to learn
            that the server is not ready.
        drain: the time that accepted requests have to finish once the server stops to accept, in seconds.
    """

    max_batch_size: Annotated[
        int,
        Option(
            "--max-batch N",
            "Largest batch size that requests to a model are combined into, and largest number of texts that are generated at once; 1 runs "
            "each request alone.",
        ),
    ] = 32
    batching_delay: Annotated[
        float,
        Option(
            "--max-delay-ms MS",
            "Batching delay: how long a request waits for others to join its batch, in milliseconds.",
            maximum=60_000,
            unit=1e-3,
        ),
    ] = 0.0
    max_pending_requests: Annotated[
        int,
        Option(
            "--max-queue N",
            "Largest number of requests to a model that wait for an answer; further requests are refused with status 503 or UNAVAILABLE.",
        ),
    ] = 256
    max_connections: Annotated[
        int,
        Option(
            "--max-connections N",
            "Largest number of open HTTP connections, of open gRPC connections, and of concurrent gRPC requests.",
        ),
    ] = 1024
    first_request: Annotated[
        float,
        Option(
            "--first-request-s SECONDS",
            "Longest time that a connection may take for its TLS handshake, and for the head of its first request, in seconds.",
            minimum=1e-3,
        ),
    ] = 10.0
    max_request_bytes: Annotated[
        int,
        Option(
            "--max-body-mb MB",
            "Largest size of a request, in megabytes (1 MB is 10^6 bytes).",
            minimum=1e-3,
            maximum=2000,
            unit=10**6,
        ),
    ] = 64_000_000
    deadline: Annotated[
        float, Option("--deadline-s SECONDS", "Longest time that a request may take, in seconds.", minimum=1e-3)
    ] = 60.0
    max_waiting_tokens: Annotated[
        int,
        Option(
            "--max-tokens-waiting N",
            "Largest number of tokens of prompts that wait for a model to begin with their texts.",
        ),
    ] = 262_144
    max_sequences: Annotated[
        int, Option("--max-sequences N", "Largest number of sequences whose state a model keeps.")
    ] = 8
    sequence_idle: Annotated[
        float,
        Option(
            "--sequence-idle-s SECONDS",
            "Idle time after which a sequence is evicted if another one needs its place, in seconds.",
        ),
    ] = 60.0
    linger: Annotated[
        float,
        Option("--linger-s SECONDS", "How long new requests are still accepted after SIGTERM or SIGHUP, in seconds."),
    ] = 1.0
    drain: Annotated[
        float,
        Option("--drain-s SECONDS", "How long accepted requests may still take when the server stops, in seconds."),
    ] = 30.0

    @property
    def sending(self) -> float:
        """The time from the first byte of an answer to the last, in seconds: a short deadline cuts no answer off on a busy machine."""
        return max(self.deadline, _LEAST_SENDING_SECONDS)
