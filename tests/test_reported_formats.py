"""Names, tensors and algorithms that loaders have dropped or misread, each with its right value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from format_files import dotted, kohya
from lycoris_files import for_modules, lokr
from peft import LoKrConfig
from torch import Tensor, nn
from toys import TOY_MODULES, Snapshot, Toy, pairs, tensors_of, toy, toy_input

from lora_slots import (
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)

Q, V = TOY_MODULES[:2]
PAIRS = pairs(dict.fromkeys(TOY_MODULES, 4), seed=1)


# The model has a level that the file does not name


class Multimodal(nn.Module):
    """``language_model.model.layers.{0,1}.{q_proj,v_proj}``."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model: Toy = toy()

    def forward(self, x: Tensor) -> Tensor:
        return self.language_model(x)


@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_outer_level_is_refused_with_three_names_of_each_side(strict: bool) -> None:
    model = Multimodal()
    manager = SlotManager(model, max_rank=8)
    before = Snapshot.of(manager, model)
    with pytest.raises(TargetMismatchError, match=r"^4 of the 4 modules") as raised:
        manager.load(read_adapter(tensors_of(PAIRS, prefix="")), strict=strict)
    before.assert_unchanged(manager, model)
    theirs, ours = str(raised.value).split("the model's target modules are")
    for name in TOY_MODULES[:3]:
        assert f"{name}: no such module in the model" in theirs
        assert f" language_model.{name}" in ours


def test_an_outer_level_that_half_the_names_lack_is_refused_or_reported() -> None:
    inner = {name: both for name, both in PAIRS.items() if "layers.1" in name}
    outer = {f"language_model.{name}": PAIRS[name] for name in (Q, V)}
    raw = read_adapter(tensors_of({**outer, **inner}, prefix=""))
    model = Multimodal()
    manager = SlotManager(model, max_rank=8)
    with pytest.raises(TargetMismatchError, match=r"^2 of the 4 modules .*pass strict=False"):
        manager.load(raw)
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    report = manager.load(raw, strict=False)
    assert report.modules == tuple(outer)
    assert report.skipped == tuple((name, "no such module in the model") for name in inner)


class Encoder(nn.Module):
    """``encoder.q_proj``, under ``text_model`` or not."""

    def __init__(self, level: str) -> None:
        super().__init__()
        inner = nn.Module()
        inner.encoder = nn.ModuleDict({"q_proj": nn.Linear(8, 6)})
        if level:
            self.text_model = inner
        else:
            self.encoder = inner.encoder


@pytest.mark.parametrize("spelling", [(dotted, "text_encoder."), (kohya, "lora_te_")])
@pytest.mark.parametrize("level", ["text_model.", ""], ids=["file has it", "file has not"])
@pytest.mark.parametrize("live", ["text_model.", ""], ids=["model has it", "model has not"])
def test_a_text_encoder_is_found_with_and_without_the_level_that_transformers_removed(
    live: str, level: str, spelling: tuple[Any, str]
) -> None:
    spell, prefix = spelling
    raw = read_adapter(spell(pairs({f"{level}encoder.q_proj": 4}), 8, prefix=prefix))
    report = SlotManager(Encoder(live), max_rank=4).load(raw)
    assert report.scaling == {f"{live}encoder.q_proj": 2.0}


# What is added to whole parameters


class Normed(nn.Module):
    """``x(norm_q(q_proj(i))) + k_proj(i)``."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 6, bias=False)
        self.k_proj = nn.Linear(8, 6, bias=False)
        self.norm_q = nn.RMSNorm(6)
        self.x = nn.LayerNorm(6)

    def forward(self, i: Tensor) -> Tensor:
        return self.x(self.norm_q(self.q_proj(i))) + self.k_proj(i)


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed().eval()


DIFFS = {
    name: torch.randn(6, generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("q_proj.diff_b", "norm_q.diff", "x.w_norm", "x.b_norm",
                                 "k_proj.diff_b"))
}  # fmt: skip
PAIR = pairs({"q_proj": 4}, seed=3)


def with_diffs(flat: bool, diffs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The pair at scaling 3 and ``diffs``, as kohya or as Wan's trainers name them."""
    if flat:
        return kohya(PAIR, 12) | {f"lora_unet_{key}": tensor for key, tensor in diffs.items()}
    prefix = "diffusion_model."
    return dotted(PAIR, 12, prefix) | {prefix + key: tensor for key, tensor in diffs.items()}


@pytest.mark.parametrize("flat", [True, False], ids=["kohya", "Wan"])
@torch.no_grad()
def test_added_parameters_are_refused_by_count_and_kind_left_out_or_applied(flat: bool) -> None:
    raw = read_adapter(with_diffs(flat, DIFFS))
    model, x = normed(), toy_input()
    manager = SlotManager(model, max_rank=4)
    message = r"2 diff_b \(.*\); 1 diff \(.*\); 1 w_norm \(.*\); 1 b_norm \(.*\).*strict=False"
    with pytest.raises(UnsupportedAdapterError, match=message):
        manager.load(raw)
    assert torch.equal(model(x), normed()(x))
    report = manager.load(raw, strict=False)
    kinds = [key.rpartition(".")[2] for key in DIFFS]
    assert sorted(reason for _, reason in report.skipped) == sorted(kinds)
    expected = normed()
    A, B = PAIR["q_proj"]
    expected.q_proj.weight += 3 * B @ A
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)

    model = normed()
    manager = SlotManager(model, max_rank=4, full_modules=["norm_q", "x"], bias=True)
    assert manager.load(raw, weight=0.5).skipped == ()
    expected = normed()
    expected.q_proj.weight += 1.5 * B @ A
    expected.norm_q.weight += 0.5 * DIFFS["norm_q.diff"]
    expected.x.weight += 0.5 * DIFFS["x.w_norm"]
    expected.x.bias += 0.5 * DIFFS["x.b_norm"]
    for name in ("q_proj", "k_proj"):  # the weight alone, never alpha / r
        layer = expected.get_submodule(name)
        layer.bias = nn.Parameter(0.5 * DIFFS[f"{name}.diff_b"])
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flat", [True, False], ids=["kohya", "Wan"])
def test_added_parameters_of_zeros_need_no_room_and_are_reported(flat: bool) -> None:
    zeros = {key: torch.zeros_like(tensor) for key, tensor in DIFFS.items()}
    report = SlotManager(normed(), max_rank=4).load(read_adapter(with_diffs(flat, zeros)))
    assert [reason for _, reason in report.skipped] == ["all zero"] * 5
    assert report.scaling == {"q_proj": 3.0}


# DoRA's axis


@torch.no_grad()
def test_on_a_square_layer_only_the_shape_of_the_scale_tells_its_axis() -> None:
    tensors = tensors_of(pairs({"0": 2}, outputs=8), prefix="")
    magnitude = torch.rand(8, generator=torch.Generator().manual_seed(2)) + 1

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8, bias=False)).double()

    model, x = build(), toy_input().double()
    manager = SlotManager(model, max_rank=2, dora=True)
    manager.load(read_adapter(tensors | {"0.dora_scale": magnitude[:, None]}))
    weight = build()[0].weight + (tensors["0.lora_B.weight"] @ tensors["0.lora_A.weight"]).double()
    weight = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(model(x), x @ weight.T, rtol=1e-6, atol=1e-6)
    before = Snapshot.of(manager, model)
    with pytest.raises(
        UnsupportedAdapterError, match=r"dora_scale .* \(1, 8\), one value for each"
    ):
        manager.load(read_adapter(tensors | {"0.dora_scale": magnitude[None]}))
    before.assert_unchanged(manager, model)


# A LoKr of two whole factors, whose scaling loaders do not agree on


@pytest.mark.parametrize(
    ("alpha", "config", "scaling"),
    [(1.0, None, 1.0), (None, LoKrConfig(r=8, alpha=1), 0.125)],
    ids=["LyCORIS", "PEFT"],
)
@torch.no_grad()
def test_two_whole_factors_are_scaled_as_the_writer_of_the_file_scales_them(
    alpha: float | None, config: Any, scaling: float
) -> None:
    parts = lokr((2, 2), (3, 4), dtype=torch.float32)
    assert {name: tuple(t.shape) for name, t in parts.items()} == {
        "lokr_w1": (2, 2), "lokr_w2": (3, 4),
    }  # fmt: skip
    model, x = toy(), toy_input()
    report = SlotManager(model, max_rank=6).load(
        read_adapter(for_modules({Q: parts}, alpha), config)
    )
    assert report.scaling == {Q: scaling}
    weight = toy().model.layers[0].q_proj.weight + scaling * torch.kron(*parts.values())
    torch.testing.assert_close(model(x)[0, 0], x @ weight.T, rtol=1e-5, atol=1e-5)


# What rides along with the pairs


class LanguageModel(nn.Module):
    """``h.{0,1}: Linear(8 -> 16)`` and ``lm_head: Linear(16 -> 32)``."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16)])
        self.lm_head = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.h[0](x) + self.h[1](x))


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel().eval()


BOTH = pairs({"h.0": 4, "h.1": 4}, outputs=16, seed=5)
P = "base_model.model."
HEAD = torch.randn(32, 16, generator=torch.Generator().manual_seed(6))
RIDERS = {
    f"{P}lm_head.weight": HEAD,
    f"{P}lm_head.base_layer.weight": language_model().lm_head.weight.detach(),
    f"{P}h.0.base_layer.bias": torch.full((16,), 0.25),
    f"{P}h.1.bias": torch.full((16,), 0.5),
}
CONFIG = {"r": 4, "lora_alpha": 8, "bias": "all", "modules_to_save": ["lm_head"]}


@torch.no_grad()
def test_tensors_beside_the_pairs_are_refused_by_kind_left_out_or_applied() -> None:
    raw = read_adapter(tensors_of(BOTH) | RIDERS, CONFIG)
    model, x = language_model(), toy_input()
    manager = SlotManager(model, max_rank=4)
    message = (
        r"modules_to_save=\['lm_head'\].*1 full weight \(base_model\.model\.lm_head\.weight\); "
        r"2 bias \(.*h\.0\.base_layer\.bias, .*h\.1\.bias\); build .* with "
        r"full_modules=\['lm_head'\] and bias=True, or pass strict=False"
    )
    with pytest.raises(UnsupportedAdapterError, match=message):
        manager.load(raw)
    assert torch.equal(model(x), language_model()(x))
    report = manager.load(raw, strict=False)
    assert dict(report.skipped) == {
        f"{P}lm_head.weight": "full weight",
        f"{P}lm_head.base_layer.weight": "equal to the model's own",
        f"{P}h.0.base_layer.bias": "bias",
        f"{P}h.1.bias": "bias",
    }

    model = language_model()
    one = {f"{P}h.0.lora_B.bias": torch.ones(16)}
    raw = read_adapter(tensors_of(BOTH) | RIDERS | one, CONFIG)
    manager = SlotManager(
        model, max_rank=4, target_modules=["h.0", "h.1"], full_modules=["lm_head"], bias=True
    )
    report = manager.load(raw)
    assert report.skipped == ((f"{P}lm_head.base_layer.weight", "equal to the model's own"),)
    expected = language_model()
    for layer, bias in zip(expected.h, (0.25 + 2, 0.5), strict=True):  # a lora_bias of 1, twice
        layer.bias.fill_(bias)
    for name, (A, B) in BOTH.items():
        expected.get_submodule(name).weight += 2 * B @ A
    expected.lm_head.weight.copy_(HEAD)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(model(x), language_model()(x))
