"""Models of sound: openai-whisper, torchaudio, speechbrain."""

from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.libraries.case import batch_of, batched, fixed, made, table
from tests.zoo.architectures.build import BATCH

_WAV2VEC2 = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 3, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.1,
    "encoder_pos_conv_kernel": 16,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 3,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.1,
    "encoder_ff_interm_features": 64,
    "encoder_ff_interm_dropout": 0.1,
    "encoder_dropout": 0.1,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.1,
    "aux_num_out": 29,
}


def _whisper() -> Any:
    from whisper.model import ModelDimensions, Whisper

    return Whisper(
        ModelDimensions(
            n_mels=20,
            n_audio_ctx=16,
            n_audio_state=32,
            n_audio_head=4,
            n_audio_layer=3,
            n_vocab=64,
            n_text_ctx=24,
            n_text_state=32,
            n_text_head=4,
            n_text_layer=3,
        )
    )


def _whisper_decoder() -> torch.nn.Module:
    """The decoder for more than one token at a time."""
    from whisper import model

    attention: Any = torch.nn.functional.scaled_dot_product_attention

    def masked(*args: Any, is_causal: Any = False, **kwargs: Any) -> torch.Tensor:
        # What a size decides is a number of torch, which the operator does not take.
        return attention(*args, is_causal=bool(is_causal), **kwargs)

    model.scaled_dot_product_attention = masked
    decoder: torch.nn.Module = _whisper().decoder
    return decoder


def _conformer() -> torch.nn.Module:
    """The frames of the longest sequence are all of the input's: torchaudio asks the lengths, which are data."""
    from torchaudio.models import conformer

    def padding_mask(lengths: torch.Tensor) -> torch.Tensor:
        return torch.arange(20).expand(lengths.shape[0], 20) >= lengths.unsqueeze(1)

    conformer._lengths_to_padding_mask = padding_mask
    model: torch.nn.Module = conformer.Conformer(
        input_dim=16, num_heads=4, ffn_dim=32, num_layers=3, depthwise_conv_kernel_size=7
    )
    return model


def _tokens_and_sound() -> Inputs:
    length = Dim("length", min=1, max=24)
    args = torch.randint(0, 64, (2, 7)), torch.randn(2, 16, 32)
    return Inputs(args=args, dynamic_shapes=({0: BATCH, 1: length}, {0: BATCH}))


def _waves() -> Inputs:
    return Inputs(args=(torch.randn(2, 1600),), dynamic_shapes=({0: BATCH, 1: Dim("samples", min=800, max=16000)},))


def _frames(*names: str, width: int) -> Inputs:
    frames = Dim("frames", min=8, max=200)
    return Inputs(args=(torch.randn(2, 20, width),), dynamic_shapes=({0: BATCH, 1: frames},))


CASES = table(
    "openai-whisper",
    {
        "encoder": (lambda: _whisper().encoder, batch_of((20, 32))),
        "decoder": (_whisper_decoder, _tokens_and_sound),
        "both": (_whisper, batched(lambda: {"mel": torch.randn(2, 20, 32), "tokens": torch.randint(0, 64, (2, 7))})),
    },
    libraries=("whisper",),
)
CASES += table(
    "torchaudio",
    {
        "wav2vec2": (made("torchaudio.models:wav2vec2_model", **_WAV2VEC2), _waves),
        "conformer": (_conformer, fixed(lambda: (torch.randn(2, 20, 16), torch.tensor([20, 14])))),
        "conv-tasnet": (
            made(
                "torchaudio.models:ConvTasNet",
                enc_num_feats=32,
                msk_num_feats=16,
                msk_num_hidden_feats=32,
                msk_num_layers=3,
                msk_num_stacks=2,
            ),
            batch_of((1, 800)),
        ),
        "hdemucs": (
            made("torchaudio.models:HDemucs", sources=["drums", "bass"], channels=8, depth=4, nfft=1024),
            batch_of((2, 8192)),
        ),
        "wavernn": (
            made(
                "torchaudio.models:WaveRNN",
                upsample_scales=[2, 2, 3],
                n_classes=16,
                hop_length=12,
                n_res_block=2,
                n_rnn=16,
                n_fc=16,
                n_freq=12,
                n_hidden=16,
                n_output=16,
            ),
            batch_of((1, 72), (1, 12, 10)),
        ),
        "deepspeech": (
            made("torchaudio.models:DeepSpeech", n_feature=16, n_hidden=32, n_class=8),
            batch_of((1, 20, 16)),
        ),
        "mel-spectrogram": (
            made("torchaudio.transforms:MelSpectrogram", sample_rate=16000, n_fft=128, n_mels=20),
            _waves,
        ),
    },
)
CASES += table(
    "speechbrain",
    {
        "ecapa-tdnn": (
            made(
                "speechbrain.lobes.models.ECAPA_TDNN:ECAPA_TDNN",
                input_size=20,
                lin_neurons=16,
                channels=[32, 32, 32, 32, 48],
                attention_channels=16,
                se_channels=16,
            ),
            batch_of((40, 20)),
        ),
        "crdnn": (
            made(
                "speechbrain.lobes.models.CRDNN:CRDNN",
                input_size=20,
                cnn_blocks=1,
                cnn_channels=(8,),
                rnn_layers=1,
                rnn_neurons=16,
                dnn_neurons=16,
            ),
            fixed(lambda: (torch.randn(2, 40, 20),)),  # the batch is a number of Python in its recurrent layers
        ),
        "xvector": (
            made(
                "speechbrain.lobes.models.Xvector:Xvector",
                in_channels=20,
                tdnn_channels=[16, 16, 16, 16, 32],
                lin_neurons=16,
            ),
            batch_of((40, 20)),
        ),
    },
)
