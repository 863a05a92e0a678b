"""Sentences -> their similarities, by a served MiniLM: `embed.py URL TOKENIZER_JSON SENTENCE...`.

The tokenizer runs here, in the client; the server knows token numbers only. Needs `tritonclient[http]` and `tokenizers`, no torch.
"""

import sys

import numpy
import tritonclient.http
from tokenizers import Tokenizer

LONGEST = 512  # tokens, as the model was exported


def embed(client: tritonclient.http.InferenceServerClient, tokenizer: Tokenizer, sentences: list[str]) -> numpy.ndarray:
    """The embeddings of sentences: the mean over each one's tokens, of length 1; [sentence, 384]."""
    encoded = tokenizer.encode_batch(sentences)
    ids = numpy.array([one.ids for one in encoded])
    mask = numpy.array([one.attention_mask for one in encoded])
    inputs = [
        tritonclient.http.InferInput(name, list(array.shape), "INT64").set_data_from_numpy(array)
        for name, array in (("input_ids", ids), ("attention_mask", mask))
    ]
    tokens = client.infer("minilm", inputs).as_numpy("last_hidden_state")
    means = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return means / numpy.linalg.norm(means, axis=1, keepdims=True)


def main() -> None:
    """Print the similarity of each sentence with each."""
    url, tokenizer_file, *sentences = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.enable_padding()
    tokenizer.enable_truncation(LONGEST)
    client = tritonclient.http.InferenceServerClient(url)
    found = embed(client, tokenizer, sentences)
    for row, sentence in zip(found @ found.T, sentences, strict=True):
        print("  ".join(f"{value:5.2f}" for value in row) + f"   {sentence}")
    client.close()


if __name__ == "__main__":
    main()
