"""Decoders whose layers are mixtures of experts."""

from tests.zoo.architectures.build import SMALL, table, tokens

EXPERTS = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
SHARED = {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
PLAIN = tokens(use_cache=False)

CASES = table(
    "mixture of experts",
    {
        "mixtral": ("MixtralForCausalLM", EXPERTS, PLAIN),
        "qwen2-moe": ("Qwen2MoeForCausalLM", SHARED, PLAIN),
        "qwen3-moe": ("Qwen3MoeForCausalLM", {**SHARED, "head_dim": 8}, PLAIN),
        "olmoe": ("OlmoeForCausalLM", EXPERTS, PLAIN),
        "granitemoe": ("GraniteMoeForCausalLM", {**EXPERTS, "use_cache": False}, tokens()),
        "phimoe": ("PhimoeForCausalLM", EXPERTS, PLAIN),
        "gpt-oss": ("GptOssForCausalLM", {**EXPERTS, "head_dim": 8, "sliding_window": 4}, PLAIN),
        "deepseek-v3": (
            "DeepseekV3ForCausalLM",
            {
                **SMALL,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 16,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
            PLAIN,
        ),
        "ernie4-5-moe": (
            "Ernie4_5_MoeForCausalLM",
            {**SHARED, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
            PLAIN,
        ),
        "dots1": (
            "Dots1ForCausalLM",
            {
                **SHARED,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "head_dim": 8,
            },
            PLAIN,
        ),
    },
    operators="transformers.integrations.moe",
)
