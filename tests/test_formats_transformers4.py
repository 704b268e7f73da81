"""Adapters made under the module names of transformers 4 load into the models of transformers 5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toys import TOKENS, WEIGHTS, peft_model, write_adapter, write_folder

from lora_slots import AdapterFileError, SlotManager, TargetMismatchError, UnsupportedAdapterError

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
IMAGE = {"image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class Old:
    """A model, and what transformers 4 called its modules: patterns of names now -> names then."""

    cls: str
    config: Mapping[str, Any]
    names: Mapping[str, str]

    def build(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        cls = getattr(transformers, self.cls)
        model: nn.Module = cls(cls.config_class(**self.config)).eval()
        return model

    def old(self, name: str) -> str:
        for pattern, then in self.names.items():
            name = re.sub(pattern, then, name)
        return name


VIT = {
    r"\blayers\.(\d)": r"encoder.layer.\1",
    r"attention\.q_proj": "attention.attention.query",
    r"attention\.v_proj": "attention.attention.value",
    r"attention\.o_proj": "attention.output.dense",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
}
DINO = {now: then for now, then in VIT.items() if now.startswith("attention")}
CLIP = {r"model\.encoder": "model.text_model.encoder"}
MODELS = {
    "ViT": Old("ViTModel", {**SIZES, **IMAGE}, VIT),
    "ViT with a head": Old("ViTForImageClassification", {**SIZES, **IMAGE}, VIT),
    "DINOv2": Old("Dinov2Model", {**SIZES, **IMAGE}, DINO),
    "CLIP": Old(
        "CLIPTextModel",
        {**SIZES, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}, CLIP,
    ),
}  # fmt: skip


def run(old: Old, model: nn.Module) -> Tensor:
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answer: Tensor = model(TOKENS if "vocab_size" in old.config else pixels)[0]
        return answer


def write_old(folder: Path, old: Old) -> Path:
    """What PEFT saves for the model, under the names of transformers 4, patterns included."""
    targets = ["q_proj", "v_proj", "fc1", "fc2"]
    path = write_adapter(
        folder, old.build(), r=4, lora_alpha=8, target_modules=targets,
        rank_pattern={"fc1": 2}, alpha_pattern={"q_proj": -3},
    )  # fmt: skip
    save_file({old.old(k): t for k, t in load_file(path / WEIGHTS).items()}, path / WEIGHTS)
    config = (path / "adapter_config.json").read_text()
    then = {now: old.old(f"attention.{now}").removeprefix("attention.") for now in ("q_proj",)}
    then["fc1"] = old.old("mlp.fc1")
    for now, name in then.items():
        config = config.replace(f'"{now}": ', f'"{name}": ')
    (path / "adapter_config.json").write_text(config)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_under_the_old_names_gives_what_peft_gives_under_the_new(
    name: str, tmp_path: Path
) -> None:
    old = MODELS[name]
    path = write_adapter(
        tmp_path / "new", old.build(), r=4, lora_alpha=8,
        target_modules=["q_proj", "v_proj", "fc1", "fc2"],
        rank_pattern={"fc1": 2}, alpha_pattern={"q_proj": -3},
    )  # fmt: skip
    expected = run(old, peft_model(old.build(), path))
    then = write_old(tmp_path / "old", old)
    keys = load_file(then / WEIGHTS)
    assert set(keys) != set(load_file(path / WEIGHTS))
    model = old.build()
    base = run(old, model)
    report = SlotManager(model, max_rank=4).load(then)
    torch.testing.assert_close(run(old, model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(base, expected, atol=1e-3)
    assert {s for m, s in report.scaling.items() if m.endswith("fc1")} == {4.0}
    assert {s for m, s in report.scaling.items() if m.endswith("q_proj")} == {-0.75}


def test_an_old_name_that_is_of_no_module_now_is_refused(tmp_path: Path) -> None:
    old = MODELS["ViT"]
    path = write_old(tmp_path / "a", old)
    tensors = load_file(path / WEIGHTS)
    save_file({k.replace("layer.1", "layer.7"): t for k, t in tensors.items()}, path / WEIGHTS)
    with pytest.raises(TargetMismatchError, match=r"encoder\.layer\.7\..*: no such module"):
        SlotManager(old.build(), max_rank=4).load(path)


# Experts of a mixture, which were modules and are one parameter now

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=128, num_local_experts=3, num_experts_per_tok=2,
        )
    ).eval()  # fmt: skip


def write_experts(path: Path, *layers: str) -> Path:
    """A folder as PEFT wrote it for Mixtral: ``w1`` and ``w3`` in, ``w2`` out of each expert."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"w1": (32, 48), "w3": (32, 48), "w2": (48, 32)}
    tensors = {}
    for expert in range(3):
        for layer in layers:
            name = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.{layer}"
            inputs, outputs = sizes[layer]
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / 4
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 4
    config = {"r": 4, "lora_alpha": 12, "target_modules": list(layers), "task_type": "CAUSAL_LM"}
    return write_folder(path, tensors, config)


IGNORE = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


@IGNORE
@pytest.mark.parametrize("layers", [("w1", "w2", "w3"), ("w2",)], ids="-".join)
def test_experts_that_were_modules_give_what_peft_makes_of_them(
    layers: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_experts(tmp_path / "a", *layers)
    model = mixtral()
    with torch.no_grad():
        base = model(TOKENS).logits
        expected = peft_model(mixtral(), path)(TOKENS).logits
        report = SlotManager(model, max_rank=8, target_modules=EXPERTS).load(path)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(base, expected, atol=1e-2)
    assert set(report.scaling.values()) == {3.0}


def test_experts_of_which_half_a_fused_layer_is_adapted_are_refused(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "a", "w1", "w2")
    message = "made for the experts of transformers 4, .* w1 without also targeting w3"
    with pytest.raises(UnsupportedAdapterError, match=message):
        SlotManager(mixtral(), max_rank=8, target_modules=EXPERTS).load(path)


@IGNORE
def test_experts_that_peft_itself_puts_in_a_wrong_place_are_refused(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "a", "w1", "w3")
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        peft_model(mixtral(), path)
    with pytest.raises(AdapterFileError, match=r"wraps .* 2 times, but has the tensors of 1"):
        SlotManager(mixtral(), max_rank=8, target_modules=EXPERTS).load(path)
