"""Continue texts, token by token, with a served decoder: `generate.py ADDRESS NEW_TOKENS TEXT...`.

Each text is a sequence of requests whose state the server keeps, from `sequence_start` to `sequence_end`. The texts take turns, so the
server holds the state of all of them at once. Needs `tritonclient[grpc]`, not torch.
"""

import sys

import numpy
import tritonclient.grpc


class GrowingText:
    """A text that the model continues; its tokens are its bytes in UTF-8.

    Attributes:
        tokens: the tokens of the text and of its continuation so far.
    """

    def __init__(
        self, client: tritonclient.grpc.InferenceServerClient, sequence_id: int, beginning: str, new_token_count: int
    ) -> None:
        """Start a sequence.

        Args:
            client: the client that sends the requests.
            sequence_id: not 0, and not used by another sequence of the server.
            beginning: the beginning of the text.
            new_token_count: the number of tokens to generate.
        """
        self.tokens = list(beginning.encode())
        self._client = client
        self._sequence_id = sequence_id
        self._position = 0
        self._final_length = len(self.tokens) + new_token_count

    def step(self) -> bool:
        """Send the next token, and keep the generated one once the text is read. Return whether there are more steps."""
        request_inputs = []
        for input_name, nested_list in (
            ("input_ids", [[self.tokens[self._position]]]),
            ("cache_position", [self._position]),
        ):
            array = numpy.array(nested_list)
            request_input = tritonclient.grpc.InferInput(input_name, list(array.shape), "INT64")
            request_inputs.append(request_input.set_data_from_numpy(array))
        is_last = self._position + 2 == self._final_length  # its answer holds the last token
        answer = self._client.infer(
            "decoder",
            request_inputs,
            sequence_id=self._sequence_id,
            sequence_start=self._position == 0,
            sequence_end=is_last,
        )
        self._position += 1
        if self._position == len(self.tokens):
            self.tokens.append(int(answer.as_numpy("output")[0, -1].argmax()))
        return not is_last


def main() -> None:
    """Print the tokens of each text with its continuation."""
    server_address, new_token_count, *beginnings = sys.argv[1:]
    client = tritonclient.grpc.InferenceServerClient(server_address)
    growing_texts = [
        GrowingText(client, sequence_id, beginning, int(new_token_count))
        for sequence_id, beginning in enumerate(beginnings, start=1)
    ]
    unfinished = list(growing_texts)
    while unfinished:
        unfinished = [growing_text for growing_text in unfinished if growing_text.step()]
    for growing_text in growing_texts:
        print(*growing_text.tokens)
    client.close()


if __name__ == "__main__":
    main()
