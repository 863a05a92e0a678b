"""Decoders: text in, text out."""

from tests.zoo.architectures.build import SMALL, table, tokens
from tests.zoo.case import Case

GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
PLAIN = tokens(use_cache=False)
MASKED = tokens("attention_mask", use_cache=False)

CASES = table(
    "decoders",
    {
        "llama": ("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 4}, PLAIN),
        "llama-masked": ("LlamaForCausalLM", GROUPED, MASKED),
        "llama-tied": ("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 4, "tie_word_embeddings": True}, PLAIN),
        "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, PLAIN),
        "ministral": ("MinistralForCausalLM", HEADS, PLAIN),
        "qwen2": ("Qwen2ForCausalLM", GROUPED, PLAIN),
        "qwen3": ("Qwen3ForCausalLM", HEADS, PLAIN),
        "gemma": ("GemmaForCausalLM", HEADS, PLAIN),
        "gemma2": ("Gemma2ForCausalLM", {**HEADS, "query_pre_attn_scalar": 8, "sliding_window": 4}, PLAIN),
        "gemma3": ("Gemma3ForCausalLM", {**HEADS, "query_pre_attn_scalar": 8, "sliding_window": 4}, PLAIN),
        "phi": ("PhiForCausalLM", SMALL, PLAIN),
        "phi3": ("Phi3ForCausalLM", SMALL, PLAIN),
        "gpt2": ("GPT2LMHeadModel", SMALL, PLAIN),
        "gpt-neo": (
            "GPTNeoForCausalLM",
            {**SMALL, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 4},
            PLAIN,
        ),
        "gpt-neox": ("GPTNeoXForCausalLM", SMALL, PLAIN),
        "gptj": ("GPTJForCausalLM", {**SMALL, "rotary_dim": 4}, PLAIN),
        "gpt-bigcode": ("GPTBigCodeForCausalLM", SMALL, PLAIN),
        "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}, PLAIN),
        "bloom": ("BloomForCausalLM", {**SMALL, "n_head": 4, "n_layer": 3}, MASKED),
        "falcon": ("FalconForCausalLM", SMALL, PLAIN),
        "mpt": ("MptForCausalLM", {**SMALL, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}, PLAIN),
        "stablelm": ("StableLmForCausalLM", {**SMALL, "num_key_value_heads": 4}, PLAIN),
        "starcoder2": ("Starcoder2ForCausalLM", GROUPED, PLAIN),
        "olmo": ("OlmoForCausalLM", SMALL, PLAIN),
        "olmo2": ("Olmo2ForCausalLM", SMALL, PLAIN),
        "cohere": ("CohereForCausalLM", SMALL, PLAIN),
        "cohere2": ("Cohere2ForCausalLM", {**SMALL, "sliding_window": 4}, PLAIN),
        "granite": ("GraniteForCausalLM", SMALL, PLAIN),
        "glm": ("GlmForCausalLM", HEADS, PLAIN),
        "glm4": ("Glm4ForCausalLM", HEADS, PLAIN),
        "smollm3": ("SmolLM3ForCausalLM", GROUPED, PLAIN),
        "codegen": ("CodeGenForCausalLM", {**SMALL, "rotary_dim": 4}, PLAIN),
        "biogpt": ("BioGptForCausalLM", SMALL, PLAIN),
        "xglm": (
            "XGLMForCausalLM",
            {**SMALL, "d_model": 32, "ffn_dim": 64, "attention_heads": 4, "num_layers": 3},
            PLAIN,
        ),
        "nemotron": ("NemotronForCausalLM", HEADS, PLAIN),
        "exaone4": ("Exaone4ForCausalLM", GROUPED, PLAIN),
        "bitnet": ("BitNetForCausalLM", GROUPED, PLAIN),
    },
)


def llama(layers: int) -> Case:
    """A Llama with so many layers."""
    return table(
        "decoders", {f"llama-{layers}": ("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": layers}, PLAIN)}
    )[0]
