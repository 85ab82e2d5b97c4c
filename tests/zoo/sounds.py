"""Models of sound, and of series of numbers, that transformers ships."""

from __future__ import annotations

from tests.zoo.base import CLASSES, PAIR, SOUND, VOCAB, Architecture

_ENCODER = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
_SERIES = {
    "d_model": 32,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 44,
    "input_size": 2,
    "prediction_length": 8,
    "context_length": 16,
    "lags_sequence": [1, 2, 8],
    "num_time_features": 1,
    "scaling": "mean",
    "distribution_output": "normal",
}


def _ctc(model: str, **own: object) -> Architecture:
    return Architecture("audio", "samples", model + "ForCTC", {**SOUND, **own})


SOUNDS: dict[str, Architecture] = {
    "data2vec_audio": _ctc("Data2VecAudio", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
    "sew": _ctc("SEW", squeeze_factor=2),
    "sew_d": _ctc("SEWD", squeeze_factor=2, position_buckets=8),
    "unispeech_sat": _ctc("UniSpeechSat"),
    "wav2vec2_conformer": _ctc("Wav2Vec2Conformer", conv_depthwise_kernel_size=3),
    "wavlm": _ctc("WavLM"),
    "wav2vec2_bert": Architecture(
        "audio",
        "frames",
        "Wav2Vec2BertForCTC",
        {
            **_ENCODER,
            "vocab_size": VOCAB,
            "feature_projection_input_dim": 16,
            "apply_spec_augment": False,
            "conv_depthwise_kernel_size": 3,
            "ctc_zero_infinity": True,
            "ctc_loss_reduction": "mean",
        },
    ),
    "parakeet": Architecture(
        "audio",
        "frames",
        "ParakeetForCTC",
        {
            "vocab_size": VOCAB,
            "pad_token_id": 0,
            "encoder_config": {
                **_ENCODER,
                "num_mel_bins": 16,
                "conv_kernel_size": 3,
                "subsampling_conv_channels": 8,
                "subsampling_factor": 4,
                "max_position_embeddings": 64,
            },
        },
    ),
    "lasr": Architecture(
        "audio",
        "frames",
        "LasrForCTC",
        {
            "vocab_size": VOCAB,
            "pad_token_id": 0,
            "encoder_config": {
                **_ENCODER,
                "num_mel_bins": 16,
                "conv_kernel_size": 4,
                "subsampling_conv_channels": 8,
                "max_position_embeddings": 64,
            },
        },
    ),
    "audio_spectrogram_transformer": Architecture(
        "audio",
        "sound",
        "ASTForAudioClassification",
        {
            **_ENCODER,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "max_length": 40,
            "num_mel_bins": 16,
            "num_labels": CLASSES,
            "problem_type": "single_label_classification",
        },
    ),
    "speech_to_text": Architecture(
        "audio",
        "frames",
        "Speech2TextForConditionalGeneration",
        {
            **{k: v for k, v in PAIR.items() if k != "max_position_embeddings"},
            "max_source_positions": 64,
            "max_target_positions": 64,
            "conv_channels": 16,
            "conv_kernel_sizes": [3, 3],
            "input_feat_per_channel": 16,
        },
    ),
    "patchtst": Architecture(
        "series",
        "series",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
            "num_hidden_layers": 2,
            "d_model": 32,
            "ffn_dim": 44,
        },
    ),
    "patchtsmixer": Architecture(
        "series",
        "series",
        "PatchTSMixerForPrediction",
        {"num_input_channels": 2, "context_length": 32, "prediction_length": 8, "num_layers": 2},
    ),
    "autoformer": Architecture(
        "series",
        "history",
        "AutoformerForPrediction",
        {**_SERIES, "label_length": 4, "moving_average": 3, "autocorrelation_factor": 1},
    ),
    "time_series_transformer": Architecture("series", "history", "TimeSeriesTransformerForPrediction", _SERIES),
}
