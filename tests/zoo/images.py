"""Models of images and videos that transformers ships, alone and beside text."""

from __future__ import annotations

from tests.zoo.base import CLASSES, GROUPED, IMAGE, IMAGE_TOKEN, PATCHES, PICTURE, SMALL, VOCAB, Architecture


def _image(model: str, chaotic: bool = False, **own: object) -> Architecture:
    return Architecture("vision", "image", model + "ForImageClassification", {**PICTURE, **own}, chaotic=chaotic)


def _patches(model: str, **own: object) -> Architecture:
    return Architecture("vision", "image", model + "ForImageClassification", {**PATCHES, **own})


_TEXT = {k: v for k, v in SMALL.items() if k != "use_cache"}
_VISION = {k: v for k, v in PATCHES.items() if k not in ("num_labels", "problem_type")}
_BACKBONE = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_HALVES = {"patch_size": 16}

IMAGES: dict[str, Architecture] = {
    "bit": _image("Bit", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4),
    "convnextv2": _image("ConvNextV2", depths=[1, 1], hidden_sizes=[16, 32], num_stages=2),
    "cvt": _image(
        "Cvt",
        embed_dim=[8, 16, 16],
        num_heads=[1, 2, 2],
        depth=[1, 2, 3],
        mlp_ratio=[2.0, 2.0, 2.0],
        drop_path_rate=[0.0, 0.0, 0.0],
    ),
    "deit": _patches("DeiT"),
    "dinov2_with_registers": _patches("Dinov2WithRegisters", mlp_ratio=2),
    "focalnet": _image(
        "FocalNet", embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]
    ),
    "hgnet_v2": _image(
        "HGNetV2",
        embedding_size=8,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 16],
        stage_mid_channels=[8, 8],
        stage_out_channels=[16, 32],
        stage_num_blocks=[1, 1],
        stage_downsample=[False, True],
        stage_downsample_strides=[2, 2],
        stage_light_block=[False, True],
        stage_kernel_size=[3, 5],
        stage_numb_of_layers=[2, 2],
    ),
    "hiera": _image(
        "Hiera",
        image_size=[IMAGE, IMAGE],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        num_query_pool=1,
        masked_unit_size=[2, 2],
        masked_unit_attention=[True, False],
        patch_size=[7, 7],
    ),
    "imagegpt": Architecture(
        "vision",
        "classes",
        "ImageGPTForImageClassification",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "num_labels": CLASSES,
            "problem_type": "single_label_classification",
        },
    ),
    "levit": _image(
        "Levit",
        chaotic=True,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        patch_size=16,
    ),
    "mobilenet_v1": _image("MobileNetV1", chaotic=True, depth_multiplier=0.25),
    "mobilevit": _image(
        "MobileViT",
        chaotic=True,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
        num_attention_heads=2,
    ),
    "mobilevitv2": _image(
        "MobileViTV2", base_attn_unit_dims=[16, 16, 16], n_attn_blocks=[1, 1, 1], width_multiplier=0.25, output_stride=8
    ),
    "poolformer": _image(
        "PoolFormer",
        depths=[1, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        num_encoder_blocks=2,
    ),
    "pvt": _image(
        "Pvt",
        num_encoder_blocks=2,
        depths=[1, 1],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    "pvt_v2": _image(
        "PvtV2",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    "siglip_vision": Architecture(
        "vision",
        "image",
        "SiglipForImageClassification",
        {"vision_config": _VISION, "num_labels": CLASSES, "problem_type": "single_label_classification"},
    ),
    "swiftformer": _image("SwiftFormer", depths=[1, 1], embed_dims=[16, 32], downsamples=[True, True], mlp_ratio=2),
    "swinv2": _image("Swinv2", patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "textnet": _image(
        "TextNet",
        image_size=[IMAGE, IMAGE],
        stem_out_channels=8,
        hidden_sizes=[8, 8, 16, 16, 16],
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
        conv_layer_strides=[[2], [1], [2], [1]],
    ),
    "timesformer": Architecture("vision", "video", "TimesformerForVideoClassification", {**PATCHES, "num_frames": 4}),
    "videomae": Architecture("vision", "video", "VideoMAEForVideoClassification", {**PATCHES, "num_frames": 4}),
    "vivit": Architecture(
        "vision", "video", "VivitForVideoClassification", {**PATCHES, "num_frames": 4, "tubelet_size": [2, 8, 8]}
    ),
    "vjepa2": Architecture(
        "vision",
        "clip",
        "VJEPA2ForVideoClassification",
        {
            **PATCHES,
            "crop_size": IMAGE,
            "frames_per_clip": 4,
            "mlp_ratio": 2.0,
            "num_pooler_layers": 1,
            "pred_hidden_size": 16,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 1,
        },
    ),
    "altclip": Architecture(
        "multimodal",
        "both",
        "AltCLIPModel",
        {"projection_dim": 16, "text_config": {**_TEXT, "project_dim": 16}, "vision_config": _VISION},
    ),
    "chinese_clip": Architecture(
        "multimodal", "both", "ChineseCLIPModel", {"projection_dim": 16, "text_config": _TEXT, "vision_config": _VISION}
    ),
    "blip": Architecture(
        "multimodal",
        "read",
        "BlipForConditionalGeneration",
        {
            "projection_dim": 16,
            "image_text_hidden_size": 16,
            "text_config": {**SMALL, "encoder_hidden_size": 32, "projection_dim": 16, "hidden_dropout_prob": 0.0},
            "vision_config": {**_VISION, "projection_dim": 16},
        },
    ),
    "git": Architecture("multimodal", "read", "GitForCausalLM", {**SMALL, "vision_config": _VISION}),
    "llava": Architecture(
        "multimodal",
        "caption",
        "LlavaForConditionalGeneration",
        {
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -1,
            "vision_config": {**_VISION, **_HALVES, "model_type": "clip_vision_model"},
            "text_config": {**GROUPED, "model_type": "llama"},
        },
    ),
    "vipllava": Architecture(
        "multimodal",
        "caption",
        "VipLlavaForConditionalGeneration",
        {
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layers": [-1, -2],
            "vision_config": {**_VISION, **_HALVES, "model_type": "clip_vision_model"},
            "text_config": {**GROUPED, "model_type": "llama"},
        },
    ),
    # Without token_type_ids transformers 5.24 attends to all tokens when it runs, to those before when it is traced.
    "paligemma": Architecture(
        "multimodal",
        "answer",
        "PaliGemmaForConditionalGeneration",
        {
            "image_token_index": IMAGE_TOKEN,
            "projection_dim": 32,
            "hidden_size": 32,
            "vision_config": {**_VISION, **_HALVES, "model_type": "siglip_vision_model"},
            "text_config": {**GROUPED, "head_dim": 8, "model_type": "gemma"},
        },
    ),
    "internvl": Architecture(
        "multimodal",
        "caption",
        "InternVLForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN,
            "downsample_ratio": 0.5,
            "vision_config": {
                **_VISION,
                "image_size": [IMAGE, IMAGE],
                "patch_size": [8, 8],
                "model_type": "internvl_vision",
            },
            "text_config": {**GROUPED, "model_type": "qwen2"},
        },
    ),
    "aya_vision": Architecture(
        "multimodal",
        "caption",
        "AyaVisionForConditionalGeneration",
        {
            "image_token_index": IMAGE_TOKEN,
            "downsample_factor": 2,
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            "text_config": {**GROUPED, "model_type": "cohere2", "sliding_window": 8},
        },
    ),
    "gemma3_vision": Architecture(
        "multimodal",
        "caption",
        "Gemma3ForConditionalGeneration",
        {
            "image_token_index": IMAGE_TOKEN,
            "mm_tokens_per_image": 4,
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            "text_config": {**GROUPED, "head_dim": 8, "sliding_window": 8, "model_type": "gemma3_text"},
        },
    ),
}
