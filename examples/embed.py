"""Compare sentences with a served MiniLM: `embed.py ADDRESS TOKENIZER_JSON SENTENCE...`.

The client tokenizes; the server receives token ids only. Needs `tritonclient[http]` and `tokenizers`, not torch.
"""

import sys

import numpy
import tritonclient.http
from tokenizers import Tokenizer

MAX_TOKENS = 512  # per sentence, the range that the model was exported with


def embed(client: tritonclient.http.InferenceServerClient, tokenizer: Tokenizer, sentences: list[str]) -> numpy.ndarray:
    """Return the embedding of each sentence, the normalized mean over its tokens: float32 [sentence, 384]."""
    encodings = tokenizer.encode_batch(sentences)
    token_ids = numpy.array([encoding.ids for encoding in encodings])
    attention_mask = numpy.array([encoding.attention_mask for encoding in encodings])
    request_inputs = [
        tritonclient.http.InferInput(input_name, list(array.shape), "INT64").set_data_from_numpy(array)
        for input_name, array in (("input_ids", token_ids), ("attention_mask", attention_mask))
    ]
    hidden_states = client.infer("minilm", request_inputs).as_numpy("last_hidden_state")
    token_means = (hidden_states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdims=True)
    return token_means / numpy.linalg.norm(token_means, axis=1, keepdims=True)


def main() -> None:
    """Print the cosine similarity of each sentence to every sentence."""
    server_address, tokenizer_path, *sentences = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.enable_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    client = tritonclient.http.InferenceServerClient(server_address)
    embeddings = embed(client, tokenizer, sentences)
    for similarities, sentence in zip(embeddings @ embeddings.T, sentences, strict=True):
        print("  ".join(f"{similarity:5.2f}" for similarity in similarities) + f"   {sentence}")
    client.close()


if __name__ == "__main__":
    main()
