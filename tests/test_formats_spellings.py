"""The same adapter loads alike under every spelling that trainers and versions have used for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from diffusers_files import PIPE, PLAIN, Written
from format_files import dotted, kohya
from torch import Tensor

from lora_slots import SlotManager, read_adapter


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("plain"), PLAIN)


def processors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As diffusers before 0.20 spelt the attention of UNets: pairs in the processor."""
    return {_in_processor(key): tensor for key, tensor in tensors.items()}


def _in_processor(key: str) -> str:
    for name in ("to_q", "to_k", "to_v"):
        key = key.replace(f".{name}.lora", f".processor.{name}_lora")
    key = key.replace(".to_out.0.lora", ".processor.to_out_lora")
    return key.replace("_A.", ".down.").replace("_B.", ".up.")


def in_text_encoder(end: str) -> Callable[[Written], dict[str, Tensor]]:
    def spell(written: Written) -> dict[str, Tensor]:
        both = written.pairs("text_encoder")
        return dotted(both, prefix="text_encoder.", down=f"{end}.down", up=f"{end}.up")

    return spell


def oldest_text_encoder(written: Written) -> dict[str, Tensor]:
    keys = in_text_encoder("_lora")(written)
    names = {"q_proj_lora": "to_q_lora", "out_proj_lora": "to_out_lora"}
    for new, old in names.items():
        keys = {key.replace(new, old): tensor for key, tensor in keys.items()}
    return keys


def without_level(written: Written) -> dict[str, Tensor]:
    both = written.pairs("text_encoder")
    bare = {m.removeprefix("text_model."): pair for m, pair in both.items()}
    return dotted(bare, prefix="text_encoder.")


def with_level(written: Written) -> dict[str, Tensor]:
    both = written.pairs("text_encoder")
    return dotted(
        {f"text_model.{m.removeprefix('text_model.')}": pair for m, pair in both.items()},
        prefix="text_encoder.",
    )


def flat_with_level(written: Written) -> dict[str, Tensor]:
    both = written.pairs("text_encoder")
    return kohya({f"text_model.{m.removeprefix('text_model.')}": p for m, p in both.items()},
                 prefix="lora_te1_")  # fmt: skip


def unet(written: Written, **spelling: str) -> dict[str, Tensor]:
    return dotted(written.pairs("unet"), **spelling)


SPELLINGS: dict[str, tuple[str, Callable[[Written], dict[str, Tensor]]]] = {
    "bare": ("unet", lambda w: unet(w)),
    "bare and down": ("unet", lambda w: unet(w, down=".lora.down", up=".lora.up")),
    "down": ("unet", lambda w: unet(w, prefix="unet.", down=".lora.down", up=".lora.up")),
    "ComfyUI": ("unet", lambda w: unet(w, prefix="diffusion_model.")),
    "checkpoint": ("unet", lambda w: unet(w, prefix="model.diffusion_model.")),
    "another name of the denoiser": ("unet", lambda w: unet(w, prefix="transformer.")),
    "kohya": ("unet", lambda w: kohya(w.pairs("unet"))),
    "kohya with dots": ("unet", lambda w: unet(w, prefix="lora_unet.")),
    "processors": ("unet", lambda w: processors(unet(w, prefix="unet."))),
    "bare processors": ("unet", lambda w: processors(unet(w))),
    "lora_linear_layer": ("text_encoder", in_text_encoder(".lora_linear_layer")),
    "text encoder before that": ("text_encoder", oldest_text_encoder),
    "with text_model": ("text_encoder", with_level),
    "without text_model": ("text_encoder", without_level),
    "kohya with text_model": ("text_encoder", flat_with_level),
    "ai-toolkit": ("text_encoder", lambda w: dotted(w.pairs("text_encoder"), prefix="lora_te.")),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_older_and_foreign_spellings_of_the_same_names_load_alike(
    spelling: str, plain: Written
) -> None:
    component, spell = SPELLINGS[spelling]
    report = plain.assert_loads(read_adapter(spell(plain)), component)
    assert report.skipped == ()


def test_an_alpha_stored_under_the_name_before_renaming_finds_its_weights(plain: Written) -> None:
    tensors = processors(unet(plain, prefix="unet."))
    alphas = {
        key.replace(".down.weight", ".alpha"): torch.tensor(8.0)
        for key in tensors
        if ".down." in key
    }
    report = SlotManager(PIPE.build().unet, max_rank=8).load(read_adapter({**tensors, **alphas}))
    assert set(report.scaling.values()) == {2.0}
