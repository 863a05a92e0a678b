"""Texts -> their continuations, token by token, by a served decoder: `generate.py URL TOKENS TEXT...`.

Each text is a sequence of requests, whose state the server keeps: it begins with `sequence_start`, and ends with `sequence_end`. The texts
take turns, so that all of them are under way at once. Needs `tritonclient[grpc]`, no torch.
"""

import sys

import numpy
import tritonclient.grpc


class Sequence:
    """A text that grows; its tokens are its bytes."""

    def __init__(self, client: tritonclient.grpc.InferenceServerClient, number: int, text: str, tokens: int) -> None:
        """`number` is not 0, and no other sequence at the server has it; `tokens` are to be written."""
        self.tokens = list(text.encode())
        self._client = client
        self._number = number
        self._read = 0
        self._whole = len(self.tokens) + tokens

    def step(self) -> bool:
        """Give the server the next token; whether there is more to do."""
        inputs = []
        for name, array in (("input_ids", [[self.tokens[self._read]]]), ("cache_position", [self._read])):
            value = numpy.array(array)
            inputs.append(tritonclient.grpc.InferInput(name, list(value.shape), "INT64").set_data_from_numpy(value))
        last = self._read + 2 == self._whole  # the answer to it is the last token
        answer = self._client.infer(
            "decoder", inputs, sequence_id=self._number, sequence_start=self._read == 0, sequence_end=last
        )
        self._read += 1
        if self._read == len(self.tokens):
            self.tokens.append(int(answer.as_numpy("output")[0, -1].argmax()))
        return not last


def main() -> None:
    """Print the tokens of each text with its continuation."""
    url, tokens, *texts = sys.argv[1:]
    client = tritonclient.grpc.InferenceServerClient(url)
    sequences = [Sequence(client, number, text, int(tokens)) for number, text in enumerate(texts, start=1)]
    running = list(sequences)
    while running:
        running = [sequence for sequence in running if sequence.step()]
    for sequence in sequences:
        print(*sequence.tokens)
    client.close()


if __name__ == "__main__":
    main()
