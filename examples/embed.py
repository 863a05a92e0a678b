"""Compare sentences with a served MiniLM: `embed.py ADDRESS TOKENIZER_JSON SENTENCE...`.

The client tokenizes, by the tokenizer.json of the bundle, which cuts and pads texts too; the server receives token ids only. Needs
`tritonclient[http]` and `tokenizers`, not torch.
"""

import sys

import numpy
import tritonclient.http
from tokenizers import Tokenizer


def embed(client: tritonclient.http.InferenceServerClient, tokenizer: Tokenizer, sentences: list[str]) -> numpy.ndarray:
    """Return the embedding of each sentence, float32 [sentence, 384]."""
    encodings = tokenizer.encode_batch(sentences)
    arrays = {
        "input_ids": numpy.array([encoding.ids for encoding in encodings]),
        "attention_mask": numpy.array([encoding.attention_mask for encoding in encodings]),
        "token_type_ids": numpy.array([encoding.type_ids for encoding in encodings]),
    }
    request_inputs = [
        tritonclient.http.InferInput(input_name, list(array.shape), "INT64").set_data_from_numpy(array)
        for input_name, array in arrays.items()
    ]
    return client.infer("minilm", request_inputs).as_numpy("sentence_embedding")


def main() -> None:
    """Print the cosine similarity of each sentence to every sentence."""
    server_address, tokenizer_path, *sentences = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    client = tritonclient.http.InferenceServerClient(server_address)
    embeddings = embed(client, tokenizer, sentences)
    for similarities, sentence in zip(embeddings @ embeddings.T, sentences, strict=True):
        print("  ".join(f"{similarity:5.2f}" for similarity in similarities) + f"   {sentence}")
    client.close()


if __name__ == "__main__":
    main()
