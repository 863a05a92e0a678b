"""Models of sound."""

import torch

from stagepack.capture.inputs import Inputs
from tests.zoo.architectures.build import BATCH, DECODED, SMALL, SMALL_PAIR, batched, fixed, ids, table

WAVE = {
    **SMALL,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 4, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
SECOND = batched(lambda: {"input_values": torch.randn(2, 1600)})

CASES = table(
    "audio",
    {
        "wav2vec2": ("Wav2Vec2Model", WAVE, SECOND),
        "wav2vec2-ctc": ("Wav2Vec2ForCTC", WAVE, SECOND),
        "hubert": ("HubertModel", WAVE, SECOND),
        "wavlm": ("WavLMModel", WAVE, SECOND),
        "unispeech": ("UniSpeechModel", WAVE, SECOND),
        "unispeech-sat": ("UniSpeechSatModel", WAVE, SECOND),
        "data2vec-audio": ("Data2VecAudioModel", WAVE, SECOND),
        "sew": ("SEWModel", {**WAVE, "squeeze_factor": 2}, SECOND),
        "whisper": (
            "WhisperForConditionalGeneration",
            {**SMALL_PAIR, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
            lambda: Inputs(
                kwargs={"input_features": torch.randn(2, 16, 64), "decoder_input_ids": ids(2, 6), "use_cache": False},
                dynamic_shapes={"input_features": {0: BATCH}, "decoder_input_ids": {0: BATCH, 1: DECODED}},
            ),
        ),
        "speech-to-text": (
            "Speech2TextForConditionalGeneration",
            {
                **SMALL_PAIR,
                "input_feat_per_channel": 16,
                "max_source_positions": 64,
                "max_target_positions": 64,
                "conv_channels": 32,
            },
            fixed(
                lambda: {"input_features": torch.randn(2, 24, 16), "decoder_input_ids": ids(2, 6), "use_cache": False}
            ),
        ),
        "audio-spectrogram-transformer": (
            "ASTModel",
            {**SMALL, "patch_size": 4, "max_length": 32, "num_mel_bins": 16, "time_stride": 4, "frequency_stride": 4},
            batched(lambda: {"input_values": torch.randn(2, 32, 16)}),
        ),
        "moonshine": (
            "MoonshineForConditionalGeneration",
            {
                **SMALL,
                "encoder_num_hidden_layers": 2,
                "decoder_num_hidden_layers": 2,
                "encoder_num_attention_heads": 4,
                "decoder_num_attention_heads": 4,
                "encoder_num_key_value_heads": 4,
                "decoder_num_key_value_heads": 4,
            },
            fixed(lambda: {"input_values": torch.randn(2, 3200), "decoder_input_ids": ids(2, 6), "use_cache": False}),
        ),
    },
)
