"""Ask a served model what lines of the maintenance log mean: `python -m examples.train_minilm.ask ADDRESS MODEL TOKENIZER_JSON LINE...`.

The meaning is looked for among the sentences of `held_out_pairs`. Needs `tritonclient[http]` and `tokenizers`, not torch.
"""

import sys

import numpy
import tritonclient.http
from tokenizers import Tokenizer

from examples.train_minilm.pairs import held_out_pairs


def main() -> None:
    """Print the three most similar sentences to each line."""
    server_address, model_name, tokenizer_path, *lines = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    client = tritonclient.http.InferenceServerClient(server_address)
    sentences = [pair.sentence for pair in held_out_pairs()]
    similarities = embed(client, model_name, tokenizer, lines) @ embed(client, model_name, tokenizer, sentences).T
    for line, row in zip(lines, similarities, strict=True):
        print(line)
        for index in numpy.argsort(-row)[:3]:
            print(f"  {row[index]:.2f}  {sentences[index]}")
    client.close()


def embed(
    client: tritonclient.http.InferenceServerClient, model_name: str, tokenizer: Tokenizer, texts: list[str]
) -> numpy.ndarray:
    """Return the embedding of each text, float32 [text, 384]."""
    encodings = tokenizer.encode_batch(texts)
    arrays = {
        "input_ids": numpy.array([encoding.ids for encoding in encodings]),
        "attention_mask": numpy.array([encoding.attention_mask for encoding in encodings]),
        "token_type_ids": numpy.array([encoding.type_ids for encoding in encodings]),
    }
    inputs = [
        tritonclient.http.InferInput(input_name, list(array.shape), "INT64").set_data_from_numpy(array)
        for input_name, array in arrays.items()
    ]
    return client.infer(model_name, inputs).as_numpy("sentence_embedding")


if __name__ == "__main__":
    main()
