"""Files that name the modules of Flux as its authors, kohya or xlabs do."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin
from foreign_files import ForeignFile, assert_loads, flux, run_flux

from lora_slots.attach.survey import survey
from lora_slots.reading import read_adapter
from lora_slots.resolve.fused import convert
from lora_slots.resolve.pairing import pair_up, settle_scaling

IMAGE = ("attn.to_q", "attn.to_k", "attn.to_v")
TEXT = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
# What every spelling has in common: a module in the authors' code, and those of diffusers.
IN_DOUBLE_BLOCK = {
    "img_attn.qkv": IMAGE,
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_attn.qkv": TEXT,
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
}
AROUND = {
    "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
    "single_blocks.0.modulation.lin": "single_transformer_blocks.0.norm.linear",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
SPELLINGS = {
    "kohya": {"prefix": "lora_unet_"},
    "comfy": {"prefix": "diffusion_model."},
    "comfy by PEFT": {"prefix": "diffusion_model.", "peft": True},
    "bare": {"peft": True},
    "fal, a wrapped model by PEFT": {"prefix": "base_model.model.", "peft": True},
}


def flux_file(spelling: str, last_alpha: float = -2.0) -> ForeignFile:
    file = ForeignFile(flux(), **SPELLINGS[spelling])
    alphas = iter([None, 1.0, 6.0, 3.0, last_alpha] * 8)

    def add(name: str, *paths: str, swapped: bool = False) -> None:
        name = name.replace(".", "_") if spelling == "kohya" else name
        file.add(name, *paths, rank=4, alpha=next(alphas), swapped=swapped)

    for block in range(2):
        for name, own in IN_DOUBLE_BLOCK.items():
            paths = (f"transformer_blocks.{block}.{path}" for path in own)
            add(f"double_blocks.{block}.{name}", *paths)
    for name, path in AROUND.items():
        add(name, path)
    # The authors' code has the shift before the scale.
    add("final_layer.adaLN_modulation.1", "norm_out.linear", swapped=True)
    return file


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_has_the_same_meaning(spelling: str) -> None:
    file = flux_file(spelling)
    assert len(assert_loads(file, run_flux).modules) == 2 * 14 + 10


def test_diffusers_agrees_on_kohyas() -> None:
    # It never returns from a negative alpha.
    file = flux_file("kohya", last_alpha=2.0)
    model = copy.deepcopy(file.model)
    tensors = FluxLoraLoaderMixin.lora_state_dict(dict(file.tensors))
    # It forgets the component of these.
    whole = {
        k if k.startswith("transformer.") else f"transformer.{k}": v for k, v in tensors.items()
    }
    model.load_lora_adapter(whole, prefix="transformer")
    # It reads no alpha of the final layer.
    rest = file.scaling["norm_out.linear"], file.scaling["proj_out"]
    for name, scaling in zip(("norm_out.linear", "proj_out"), rest, strict=True):
        model.get_submodule(name).scaling["default_0"] *= scaling
    torch.testing.assert_close(run_flux(model), file.expected(run_flux), rtol=1e-4, atol=1e-5)


def test_xlabs_files_have_no_alpha_and_load() -> None:
    file = ForeignFile(flux())
    file.down, file.up = ".down.weight", ".up.weight"
    for block in range(2):
        name, own = f"double_blocks.{block}.processor", f"transformer_blocks.{block}"
        file.add(f"{name}.qkv_lora1", *(f"{own}.{path}" for path in IMAGE))
        file.add(f"{name}.qkv_lora2", *(f"{own}.{path}" for path in TEXT))
        file.add(f"{name}.proj_lora1", f"{own}.attn.to_out.0")
        file.add(f"{name}.proj_lora2", f"{own}.attn.to_add_out")
    own = "single_transformer_blocks.0"
    file.add("single_blocks.0.processor.qkv_lora", *(f"{own}.{path}" for path in IMAGE))
    file.add("single_blocks.0.processor.proj_lora", f"{own}.proj_out")
    assert_loads(file, run_flux)
    assert set(file.scaling.values()) == {1.0}


def test_the_fused_layer_of_single_blocks_is_cut_at_its_real_width() -> None:
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=0, num_single_layers=1)
    A, B = torch.randn(2, 3072), torch.randn(3 * 3072 + 12288, 2)
    name = "lora_unet_single_blocks_0_linear1"
    raw = read_adapter(
        {
            f"{name}.lora_down.weight": A,
            f"{name}.lora_up.weight": B,
            f"{name}.alpha": torch.tensor(1.0),
        }
    )
    parts = convert(pair_up(raw)[0], survey(model), raw)[name]
    block = "single_transformer_blocks.0"
    assert [part.module for part in parts] == [f"{block}.{path}" for path in (*IMAGE, "proj_mlp")]
    assert all(part.lora_A is A for part in parts)
    assert torch.equal(torch.cat([part.lora_B for part in parts]), B)
    assert {settle_scaling(part, part.module, None, raw) for part in parts} == {0.5}


def test_bfloat16_files_of_any_rank_keep_every_bit() -> None:
    """diffusers would scale these by 256 / 257, since bfloat16 does not know 257."""
    file = ForeignFile(flux(), prefix="lora_unet_")
    A, B = file.random(257, 16).bfloat16(), file.random(16, 257).bfloat16()
    file.put("double_blocks_0_img_attn_proj", A, B)
    raw = read_adapter(file.tensors)
    ((part,),) = convert(pair_up(raw)[0], survey(file.model), raw).values()
    assert part.lora_A is A
    assert part.lora_B is B
    assert settle_scaling(part, part.module, None, raw) == 1.0
