"""Tiny random diffusers pipelines, LoRA files that diffusers writes for them, and its answer."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers.integrations.peft
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn

# transformers 5.24 asks for a PEFT that is not released yet before it loads into a text encoder, as
# diffusers has it do; with 0.21.2 that works.
transformers.integrations.peft.MIN_PEFT_VERSION = "0.21.2"
diffusers.utils.logging.disable_progress_bar()
diffusers.utils.logging.set_verbosity_error()
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

PROMPT = "a small red house"
END = "<|endoftext|>"
LETTERS = string.ascii_lowercase
TOKENS = 64


def clip_tokenizer() -> Any:
    words = ["<|startoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS), END]
    vocab = {word: index for index, word in enumerate(words)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=16)


def t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *LETTERS]
    return transformers.T5Tokenizer(
        vocab=[(piece, -float(index)) for index, piece in enumerate(pieces)], extra_ids=0
    )


def clip(width: int = 32, *, projection: bool = False) -> nn.Module:
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return cls(
        transformers.CLIPTextConfig(
            vocab_size=TOKENS, hidden_size=width, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=16, projection_dim=32,
            bos_token_id=0, eos_token_id=53, pad_token_id=53,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=TOKENS, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4
        )
    )


def vae(channels: int, **config: Any) -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), latent_channels=channels, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        **config,
    )  # fmt: skip


def unet(context: int, **config: Any) -> nn.Module:
    sizes: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
    }
    return diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        cross_attention_dim=context, **(sizes | config),
    )  # fmt: skip


def sd() -> Any:
    return diffusers.StableDiffusionPipeline(
        unet=unet(32), vae=vae(4), text_encoder=clip(), tokenizer=clip_tokenizer(),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(
            64, addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32, use_linear_projection=True,
        ),
        vae=vae(4), text_encoder=clip(), text_encoder_2=clip(projection=True),
        tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False), add_watermarker=False,
    )  # fmt: skip


def flux() -> Any:
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
        vae=vae(4, shift_factor=0.0), text_encoder=clip(), text_encoder_2=t5(),
        tokenizer=clip_tokenizer(), tokenizer_2=t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def sd3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
            num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=64,
            pooled_projection_dim=64, pos_embed_max_size=16,
        ),
        vae=vae(4, shift_factor=0.0), text_encoder=clip(projection=True),
        text_encoder_2=clip(projection=True), text_encoder_3=None,
        tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(), tokenizer_3=t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


@dataclass(frozen=True)
class Pipe:
    """A tiny random pipeline: a fresh copy, and the keyword arguments that it is called with.

    Attributes:
        build: Makes one; always the same weights.
        denoiser: The name of its denoiser.
        encoders: The names of the text encoders that diffusers loads LoRA into.
        call: Extra arguments of a call.
    """

    build: Callable[[], Any]
    denoiser: str
    encoders: tuple[str, ...]
    call: Mapping[str, Any]

    @property
    def components(self) -> tuple[str, ...]:
        return (self.denoiser, *self.encoders)

    def run(self, pipe: Any, *, steps: int = 2, seed: int = 5) -> Tensor:
        """One image, ``[1, 3, 32, 32]``, of a whole denoising run."""
        generator = torch.Generator().manual_seed(seed)
        return pipe(
            prompt=PROMPT, num_inference_steps=steps, generator=generator, height=32, width=32,
            output_type="pt", **self.call,
        ).images  # fmt: skip


def _seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(11)
        pipe = build()
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                part.eval()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


PIPES = {
    "sd": Pipe(_seeded(sd), "unet", ("text_encoder",), {"guidance_scale": 3.0}),
    "sdxl": Pipe(
        _seeded(sdxl), "unet", ("text_encoder", "text_encoder_2"), {"guidance_scale": 3.0}
    ),
    "flux": Pipe(_seeded(flux), "transformer", ("text_encoder",), {"max_sequence_length": 8}),
    "sd3": Pipe(
        _seeded(sd3), "transformer", ("text_encoder", "text_encoder_2"),
        {"guidance_scale": 3.0, "max_sequence_length": 8},
    ),
}  # fmt: skip


def write_lora(
    path: Path, pipe: Any, configs: Mapping[str, Mapping[str, Any]], *, seed: int
) -> Path:
    """Let PEFT make a random adapter for components of a fresh ``pipe``, and diffusers save it."""
    torch.manual_seed(seed)
    parts = {name: getattr(pipe, name) for name in configs}
    layers = {}
    for name, part in parts.items():
        part.add_adapter(LoraConfig(**{"init_lora_weights": False, **configs[name]}))
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(part, adapter_name="default")
    type(pipe).save_lora_weights(path, **layers, **_collate_lora_metadata(parts))
    return path


def by_diffusers(kind: Pipe, path: Path, *, weight: float = 1.0) -> Tensor:
    """The oracle: the image that diffusers makes with the adapter at ``path``, eager."""
    pipe = kind.build()
    pipe.load_lora_weights(path, adapter_name="only")
    pipe.set_adapters("only", weight)
    return kind.run(pipe)


# Module names of the denoisers: attention, and what follows it.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
FORWARD = ("ff.net.0.proj", "ff.net.2", "proj_mlp")
ENCODER = ("q_proj", "v_proj", "fc1")


def style_configs(kind: Pipe) -> dict[str, dict[str, dict[str, Any]]]:
    """Five adapters that differ in ranks, alphas, rules, layers and components."""
    denoiser, encoders = kind.denoiser, kind.encoders

    def encoder(**config: Any) -> dict[str, dict[str, Any]]:
        return {name: {"target_modules": list(ENCODER), **config} for name in encoders}

    return {
        "both": {
            denoiser: {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_v"]},
            **encoder(r=2, lora_alpha=1),
        },
        "denoiser": {
            denoiser: {"r": 8, "lora_alpha": 32, "target_modules": [*ATTENTION, *FORWARD]},
        },
        "encoders": encoder(r=6, lora_alpha=9),
        "patterns": {
            denoiser: {
                "r": 3, "lora_alpha": 3, "target_modules": ["to_k", "ff.net.0.proj"],
                "rank_pattern": {"to_k": 5}, "alpha_pattern": {"to_k": -4},
            },
            **encoder(r=16, lora_alpha=2, use_rslora=True),
        },
        "one": {
            denoiser: {"r": 1, "lora_alpha": 1, "target_modules": ["to_out.0"]},
            encoders[-1]: {"r": 1, "lora_alpha": 5, "target_modules": ["out_proj"]},
        },
    }  # fmt: skip


def write_styles(folder: Path, kind: Pipe) -> dict[str, Path]:
    """The five adapters of `style_configs`, in files of diffusers."""
    return {
        name: write_lora(folder / name, kind.build(), configs, seed=number)
        for number, (name, configs) in enumerate(style_configs(kind).items())
    }
