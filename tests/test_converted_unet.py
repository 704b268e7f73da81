"""Files that name the blocks of SDXL's UNet as its authors' own code (SGM) does."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin
from foreign_files import ForeignFile, assert_loads, run_unet, sdxl_unet
from torch import Tensor, nn

from lora_slots import SlotManager, TargetMismatchError, read_adapter

# Each block of SGM's flat lists, and what it is in diffusers: resnets first, then attention.
BLOCKS = {
    **{
        f"input_blocks_{3 * level + layer + 1}_0": f"down_blocks.{level}.resnets.{layer}"
        for level in range(3)
        for layer in range(2)
    },
    **{
        f"input_blocks_{3 * level + layer + 1}_1": f"down_blocks.{level}.attentions.{layer}"
        for level in (1, 2)
        for layer in range(2)
    },
    "middle_block_0": "mid_block.resnets.0",
    "middle_block_1": "mid_block.attentions.0",
    "middle_block_2": "mid_block.resnets.1",
    **{
        f"output_blocks_{3 * level + layer}_0": f"up_blocks.{level}.resnets.{layer}"
        for level in range(3)
        for layer in range(3)
    },
    **{
        f"output_blocks_{3 * level + layer}_1": f"up_blocks.{level}.attentions.{layer}"
        for level in (0, 1)
        for layer in range(3)
    },
}
IN_RESNET = {
    "conv1": "in_layers_2",
    "conv2": "out_layers_3",
    "time_emb_proj": "emb_layers_1",
    "conv_shortcut": "skip_connection",
}
OTHERS = {
    "conv_in": "input_blocks_0_0",
    "conv_out": "out_2",
    "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
    "down_blocks.0.downsamplers.0.conv": "input_blocks_3_0_op",
    "down_blocks.1.downsamplers.0.conv": "input_blocks_6_0_op",
    "up_blocks.0.upsamplers.0.conv": "output_blocks_2_2_conv",
    "up_blocks.1.upsamplers.0.conv": "output_blocks_5_2_conv",
}


def sgm_name(path: str) -> str:
    if path in OTHERS:
        return OTHERS[path]
    block, own = next((sgm, own) for sgm, own in BLOCKS.items() if path.startswith(f"{own}."))
    inner = path.removeprefix(f"{own}.")
    return f"{block}_{IN_RESNET.get(inner, inner).replace('.', '_')}"


def sgm_file(*kinds: type[nn.Module], prefix: str = "lora_unet_", **options: bool) -> ForeignFile:
    """Every layer of these kinds, each with a rank and an alpha of its own, some without alpha."""
    file = ForeignFile(sdxl_unet(), prefix=prefix, **options)
    alphas = (None, 1.0, 6.0, -2.0)
    for number, (path, module) in enumerate(file.model.named_modules()):
        if isinstance(module, kinds):
            file.add(sgm_name(path), path, rank=1 + number % 4, alpha=alphas[number % 3])
    return file


def by_diffusers(file: ForeignFile) -> Tensor:
    model, loader = copy.deepcopy(file.model), StableDiffusionXLLoraLoaderMixin
    tensors, alphas = loader.lora_state_dict(dict(file.tensors), unet_config=model.config)
    loader.load_lora_into_unet(tensors, network_alphas=alphas, unet=model)
    return run_unet(model)


def test_every_linear_layer_is_found_and_has_the_alpha_of_its_own() -> None:
    file = sgm_file(nn.Linear)
    assert len(assert_loads(file, run_unet).modules) == len(file.deltas) > 150


def test_convolutions_are_found_too() -> None:
    file = sgm_file(nn.Conv2d)
    report = assert_loads(file, run_unet, target_modules=list(file.deltas))
    assert len(report.modules) == len(file.deltas) == 50


def test_dotted_names_of_the_same_blocks_are_known() -> None:
    file = ForeignFile(sdxl_unet(), prefix="diffusion_model.", peft=True)
    path = "down_blocks.1.attentions.0.transformer_blocks.0.attn1."
    for layer in ("to_q", "to_out.0"):
        file.add(f"input_blocks.4.1.transformer_blocks.0.attn1.{layer}", path + layer, alpha=1.5)
    assert_loads(file, run_unet)


def test_diffusers_agrees_where_it_keeps_the_alphas() -> None:
    file = ForeignFile(sdxl_unet(), prefix="lora_unet_")
    for path in ("down_blocks.1.attentions.0", "up_blocks.0.attentions.2"):
        for layer in ("to_q", "to_k", "to_v"):
            own = f"{path}.transformer_blocks.0.attn2.{layer}"
            file.add(sgm_name(own), own, rank=2, alpha=3.0)
    assert_loads(file, run_unet)
    torch.testing.assert_close(file.expected(run_unet), by_diffusers(file), rtol=1e-4, atol=1e-5)


def test_text_encoders_of_the_same_file_are_reported() -> None:
    file = sgm_file(nn.Linear)
    text = {
        f"lora_te{number}_text_model_encoder_layers_0_mlp_fc1.{half}.weight": torch.ones(2, 2)
        for number in (1, 2)
        for half in ("lora_down", "lora_up")
    }
    report = SlotManager(file.model, max_rank=8).load(read_adapter(file.tensors | text))
    assert report.scaling == file.scaling
    assert {reason for _, reason in report.skipped} == {
        "other_component: text_encoder",
        "other_component: text_encoder_2",
    }


def test_the_unet_may_be_a_component() -> None:
    file = sgm_file(nn.Linear)
    unet = copy.deepcopy(file.model)
    manager = SlotManager({"text_encoder": nn.Linear(2, 2), "unet": unet}, max_rank=8)
    report = manager.load(read_adapter(file.tensors))
    assert report.scaling == {f"unet.{path}": scaling for path, scaling in file.scaling.items()}
    torch.testing.assert_close(run_unet(unet), file.expected(run_unet), rtol=1e-5, atol=1e-5)


def test_names_of_both_kinds_may_stand_in_one_file() -> None:
    """diffusers' converter would drop all of SGM's without a word."""
    file = ForeignFile(sdxl_unet(), prefix="lora_unet_")
    one, other = (f"mid_block.attentions.0.transformer_blocks.{i}.attn1.to_q" for i in range(2))
    file.add(sgm_name(one), one, alpha=9.0)
    file.add(other.replace(".", "_"), other, alpha=12.0)
    assert_loads(file, run_unet)


def test_one_unknown_name_is_named_and_the_rest_can_be_had() -> None:
    file = sgm_file(nn.Linear)
    name = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn9_to_q"
    halves = {
        f"{name}.lora_down.weight": torch.ones(2, 8),
        f"{name}.lora_up.weight": torch.ones(8, 2),
    }
    raw = read_adapter(file.tensors | halves)
    manager = SlotManager(file.model, max_rank=8)
    total = len(file.deltas) + 1
    with pytest.raises(TargetMismatchError, match=f"1 of the {total} modules .*{name}"):
        manager.load(raw)
    report = manager.load(raw, strict=False)
    assert report.scaling == file.scaling
    assert [key for key, _ in report.skipped] == [name]
