"""Texts that wait for a row of the cache: clients take turns."""

from collections import deque
from collections.abc import Iterator

from stagepack_loaders.generation.text_batch import BatchedText
from stagepack_serving.server.access_log import current_sender


class ClientQueue:
    """Texts that wait. Their senders (see `RequestRecord`) take turns; the texts of one are served first come, first served.

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
        self._texts.setdefault(current_sender(), deque()).append(batched_text)

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
