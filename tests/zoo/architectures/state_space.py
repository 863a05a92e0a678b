"""Models with a recurrent state in the place of attention, or beside it."""

from tests.zoo.architectures.build import SMALL, fixed, ids, table, tokens

PLAIN = tokens(use_cache=False)
FIXED = fixed(lambda: {"input_ids": ids(2, 8), "use_cache": False})
MAMBA = {**SMALL, "state_size": 8, "num_hidden_layers": 3, "use_mambapy": False}
MAMBA2 = {**SMALL, "state_size": 8, "expand": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}

CASES = table(
    "state space",
    {
        "mamba": ("MambaForCausalLM", MAMBA, FIXED),
        "falcon-mamba": ("FalconMambaForCausalLM", MAMBA, FIXED),
        "mamba2": ("Mamba2ForCausalLM", MAMBA2, FIXED),
        "rwkv": ("RwkvForCausalLM", {**SMALL, "attention_hidden_size": 32, "context_length": 64}, FIXED),
        "jamba": (
            "JambaForCausalLM",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "use_mamba_kernels": False,
                "num_experts": 2,
                "mamba_d_state": 8,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
            },
            FIXED,
        ),
        "recurrent-gemma": (
            "RecurrentGemmaForCausalLM",
            {**SMALL, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
            FIXED,
        ),
        "bamba": (
            "BambaForCausalLM",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_chunk_size": 4,
                "attn_layer_indices": [1],
            },
            FIXED,
        ),
        "lfm2": (
            "Lfm2ForCausalLM",
            {**SMALL, "num_key_value_heads": 2, "full_attn_idxs": [1], "block_ff_dim": 64},
            PLAIN,
        ),
        "xlstm": ("xLSTMForCausalLM", {**SMALL, "num_heads": 4, "num_blocks": 3}, FIXED),
        "zamba2": (
            "Zamba2ForCausalLM",
            {
                **MAMBA2,
                "num_mem_blocks": 1,
                "layers_block_type": ["mamba", "hybrid", "mamba"],
                "mamba_d_state": 8,
                "mamba_headdim": 8,
                "n_mamba_heads": 8,
                "num_key_value_heads": 4,
            },
            FIXED,
        ),
    },
    operators="transformers.integrations.moe",  # of Jamba
)
