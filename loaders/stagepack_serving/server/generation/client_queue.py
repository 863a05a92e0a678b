"""Texts that wait for a row of the cache: clients take turns."""

import contextlib
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from stagepack_loaders.generation.text_batch import BatchedText

_CLIENT: Final[ContextVar[str]] = ContextVar("client", default="")


@contextlib.contextmanager
def requests_of_client(authorization: str | None, address: str) -> Iterator[None]:
    """Say who sends the requests that are answered in a context: who is authorized, or who has the address of a host."""
    reset_token = _CLIENT.set(address if authorization is None else authorization)
    try:
        yield
    finally:
        _CLIENT.reset(reset_token)


class ClientQueue:
    """Texts that wait. Clients take turns; the texts of one client are served first come, first served.

    So a client that sends a hundred requests at once lets others wait for one of its texts, and not for all of them.
    """

    def __init__(self) -> None:
        # By client; the one whose turn is next comes first.
        self._texts: dict[str, deque[BatchedText]] = {}

    def __len__(self) -> int:
        """The number of texts."""
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[BatchedText]:
        """The texts, by client."""
        return (batched_text for texts in self._texts.values() for batched_text in texts)

    def append(self, batched_text: BatchedText) -> None:
        """Add a text of the client whose request is answered."""
        self._texts.setdefault(_CLIENT.get(), deque()).append(batched_text)

    def popleft(self) -> BatchedText:
        """Take out the text that is next."""
        client = next(iter(self._texts))
        texts = self._texts.pop(client)
        batched_text = texts.popleft()
        if texts:
            self._texts[client] = texts
        return batched_text

    def remove(self, batched_text: BatchedText) -> None:
        """Take out a text, if it waits."""
        for client, texts in list(self._texts.items()):
            if batched_text in texts:
                texts.remove(batched_text)
                if not texts:
                    del self._texts[client]
