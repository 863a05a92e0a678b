"""What a server takes on: the numbers that its operator sets."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server, or of each model in it.

    Attributes:
        batch: rows of several requests that one run of a model may take; 1 runs each request alone.
        delay: how long a request waits for others to join it, in seconds.
        queue: requests to one model that are accepted and not answered yet.
        connections: connections over HTTP, and as many requests over gRPC, at a time.
        body: bytes of one request, as it arrives and unpacked.
        deadline: how long a request may take, in seconds.
        sequences: sequences of calls that one model with state keeps the state of.
        idle: how long a sequence is kept without a call, in seconds, before another one may take its place.
        linger: how long requests are still taken after SIGTERM, in seconds: what routes them here needs time to hear of it.
        drain: how long requests that were accepted may still take when the server is told to stop, in seconds.
    """

    batch: int = 32
    delay: float = 0.0
    queue: int = 256
    connections: int = 1024
    body: int = 64_000_000
    deadline: float = 60.0
    sequences: int = 8
    idle: float = 60.0
    linger: float = 1.0
    drain: float = 30.0
