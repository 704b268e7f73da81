"""Routed batches of real architectures: PEFT's mixed batches, beams, padding, guidance."""

from __future__ import annotations

from pathlib import Path
from pipes import PIPES, PROMPT, by_diffusers, write_styles
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import TINY, CountingBackend, peft_model, write_adapter

from lora_slots import ArgumentError, SlotManager

CONFIGS: dict[str, dict[str, Any]] = {
    "sql": {"r": 2, "lora_alpha": 4},
    "legal": {"r": 4, "lora_alpha": -2},
    "poems": {"r": 3, "lora_alpha": 9, "use_rslora": True},
}
TOKENS = torch.arange(24).reshape(4, 6) * 7 % 128
ROWS = ["sql", None, "legal", "poems"]


def folders(tmp_path: Path, tiny: str) -> dict[str, Path]:
    """An adapter of PEFT for each of `CONFIGS`, on the attention and on half of the rest."""
    attention = list(TINY[tiny].attention)
    return {
        name: write_adapter(
            tmp_path / name, TINY[tiny].build(), seed=seed, target_modules=attention, **config
        )
        for seed, (name, config) in enumerate(CONFIGS.items())
    }


def slots(model: nn.Module, paths: dict[str, Path]) -> SlotManager:
    manager = SlotManager(model, max_rank=4, num_slots=3, routing=True)
    for name, path in paths.items():
        manager.load(path, name)
    return manager


def alone(tiny: str, paths: dict[str, Path], name: str | None) -> nn.Module:
    model = TINY[tiny].build()
    return model if name is None else peft_model(model, paths[name])


@pytest.mark.parametrize("tiny", ["llama", "gpt2", "t5"])
@torch.no_grad()
def test_logits_are_those_of_pefts_mixed_batch(tiny: str, tmp_path: Path):
    paths = folders(tmp_path, tiny)
    theirs = peft_model(TINY[tiny].build(), paths["sql"], adapter_name="sql")
    for name in ("legal", "poems"):
        theirs.load_adapter(str(paths[name]), name)
    inputs: dict[str, Tensor] = {"input_ids": TOKENS}
    if tiny == "t5":
        inputs["decoder_input_ids"] = TOKENS[:, :4]
    mixed = theirs(**inputs, adapter_names=[name or "__base__" for name in ROWS]).logits
    model = TINY[tiny].build()
    slots(model, paths).route(ROWS)
    ours = model(**inputs).logits
    torch.testing.assert_close(ours, mixed, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[1], TINY[tiny].build()(**inputs).logits[1])


@pytest.mark.parametrize(
    ("tiny", "beams", "returned"),
    [("llama", 1, 1), ("llama", 3, 1), ("llama", 3, 2), ("t5", 3, 1), ("t5", 3, 2)],
)
@torch.no_grad()
def test_generate_gives_each_row_what_its_adapter_alone_does(
    tiny: str, beams: int, returned: int, tmp_path: Path
):
    paths = folders(tmp_path, tiny)
    model = TINY[tiny].build()
    manager = slots(model, paths)
    options = {"num_beams": beams, "num_return_sequences": returned}
    # An encoder sees each row once, the decoder sees each beam.
    with manager.routed(ROWS, expand="interleave"):
        together = generate(model, TOKENS, **options)
    texts = set()
    for number, name in enumerate(ROWS):
        one = generate(alone(tiny, paths, name), TOKENS[number : number + 1], **options)
        own = together[returned * number : returned * (number + 1)]
        assert torch.equal(own, one)
        texts.add(tuple(one.flatten().tolist()))
    assert len(texts) > 1
    if beams > 1:
        manager.route(ROWS)
        with pytest.raises(ArgumentError, match="expand='interleave'"):
            generate(model, TOKENS, **options)


def generate(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    found: Tensor = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5,
        do_sample=False, pad_token_id=0, eos_token_id=None, **options,
    )  # fmt: skip
    return found


@torch.no_grad()
def test_an_encoder_with_padding(tmp_path: Path):
    paths = folders(tmp_path, "bert")
    model = TINY["bert"].build()
    slots(model, paths).route(ROWS)
    lengths = torch.tensor([6, 2, 4, 3])
    mask = (torch.arange(6) < lengths[:, None]).long()
    ours = model(TOKENS, attention_mask=mask).last_hidden_state
    for number, name in enumerate(ROWS):
        length = int(lengths[number])
        ids = TOKENS[number : number + 1, :length]
        expected = alone("bert", paths, name)(ids).last_hidden_state[0]
        torch.testing.assert_close(ours[number, :length], expected, rtol=1e-5, atol=1e-5)


def test_guidance_in_a_pipeline(tmp_path: Path):
    kind = PIPES["sd"]
    files = write_styles(tmp_path, kind)
    pipe = kind.build()
    manager = SlotManager(pipe, max_rank=16, num_slots=2, routing=True)
    for name in ("both", "patterns"):
        manager.load(files[name], name)
    backend = CountingBackend()
    pipe.unet = torch.compile(pipe.unet, backend=backend, fullgraph=True)
    for rows in (["both", None, "patterns"], [None, "patterns", "both"]):
        # The text encoder sees each prompt once, the denoiser sees them without and with guidance.
        manager.route(rows, expand="tile")
        images = batch(pipe, 3)
        for image, name in zip(images, rows, strict=True):
            expected = kind.run(kind.build()) if name is None else by_diffusers(kind, files[name])
            torch.testing.assert_close(image, expected[0], rtol=0, atol=1e-5)
        assert backend.graphs == 1


def batch(pipe: Any, count: int) -> Tensor:
    """As many images as `Pipe.run` makes one of, from the same noise."""
    generators = [torch.Generator().manual_seed(5) for _ in range(count)]
    images: Tensor = pipe(
        prompt=[PROMPT] * count, num_inference_steps=2, generator=generators, height=32, width=32,
        output_type="pt", **PIPES["sd"].call,
    ).images  # fmt: skip
    return images
