"""Names with underscores for dots are matched through the model's own names, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import PAIRS, TENSORS, assert_loads_as, write_file
from format_files import dotted, kohya
from torch import Tensor, nn
from toys import TOY_MODULES, Pairs, expected_toy, pairs, refusal, toy, toy_input

from lora_slots import (
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    inspect_adapter,
    read_adapter,
)

Q, V = TOY_MODULES[:2]
PREFIXES = [
    "lora_unet_", "lora_transformer_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_",
    "lora_prior_unet_", "lora_prior_te_", "lycoris_",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_prefix_of_any_component_may_begin_the_names_for_a_single_model(prefix: str) -> None:
    assert_loads_as(read_adapter(kohya(PAIRS, 8, prefix)), 2.0)


@pytest.mark.parametrize(
    "segment", ["_orig_mod_", "_fsdp_wrapped_module_", "_checkpoint_wrapped_module_", "module_"]
)
def test_names_saved_from_a_wrapped_model_load_as_if_it_were_not(segment: str) -> None:
    assert_loads_as(read_adapter(kohya(PAIRS, 8, f"lora_unet_{segment}")), 2.0)


def test_names_saved_from_layers_compiled_one_by_one_load_as_if_they_were_not() -> None:
    wrapped = {m.replace("layers.1", "layers.1._orig_mod"): both for m, both in PAIRS.items()}
    assert_loads_as(read_adapter(kohya(wrapped, 8)), 2.0)


# Scalings


def load_toy(tensors: dict[str, Tensor], both: Pairs, scaling: dict[str, float]) -> None:
    model = toy()
    report = SlotManager(model, max_rank=8).load(read_adapter(tensors))
    assert report.scaling == scaling
    expected = expected_toy(toy(), toy_input(), both, scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)


def test_an_old_file_without_alpha_has_scaling_1() -> None:
    load_toy(kohya(pairs({Q: 4})), pairs({Q: 4}), {Q: 1.0})


@pytest.mark.parametrize("order", [(Q, V), (V, Q)])
@pytest.mark.parametrize("spell", [kohya, dotted])
def test_mixed_ranks_without_alpha_all_have_scaling_1_in_any_order(spell: Any, order: Any) -> None:
    both = pairs({module: {Q: 2, V: 8}[module] for module in order})
    load_toy(spell(both), both, {Q: 1.0, V: 1.0})


def test_each_layer_may_have_its_own_rank_and_alpha() -> None:
    ranks = {Q: 5, V: 7, TOY_MODULES[2]: 1}
    alphas = {Q: 5, V: 3.5, TOY_MODULES[2]: 1}
    both = pairs(ranks)
    load_toy(kohya(both, alphas), both, {Q: 1.0, V: 0.5, TOY_MODULES[2]: 1.0})


@pytest.mark.parametrize("prefix", ["", "unet.", "lora_unet_"])
def test_an_alpha_goes_through_the_same_renaming_as_its_weights(prefix: str) -> None:
    both = pairs({Q: 4})
    tensors = dotted(both, prefix=prefix) if prefix != "lora_unet_" else kohya(both)
    module = next(iter(tensors)).split(".lora_")[0]
    load_toy({**tensors, f"{module}.alpha": torch.tensor(8.0)}, both, {Q: 2.0})


def test_an_alpha_of_0_means_the_rank_and_is_warned_of_once() -> None:
    with pytest.warns(
        UserWarning, match="alpha of 0 for 4 modules .* taken to mean their rank"
    ) as w:
        assert_loads_as(read_adapter(kohya(PAIRS, 0)), 1.0)
    assert len(w) == 1


# Names that are not clear


class Forked(nn.Module):
    """``a.b_c`` and ``a_b.c``, which have one name with underscores."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"b_c": nn.Linear(8, 6)})
        self.a_b = nn.ModuleDict({"c": nn.Linear(8, 6)})
        self.d_e = nn.Linear(8, 6)


@pytest.mark.parametrize("targets", ["all-linear", ["b_c"]])
def test_an_underscored_name_of_two_modules_is_refused_listing_both(targets: Any) -> None:
    manager = SlotManager(Forked(), max_rank=4, target_modules=targets)
    message = r"'a_b_c' may be a\.b_c or a_b\.c of this model"
    with pytest.raises(TargetMismatchError, match=message):
        manager.load(read_adapter(kohya(pairs({"a.b_c": 4}))))
    assert manager.loaded_adapters == ()


def test_an_ambiguous_name_that_the_file_does_not_use_is_no_obstacle() -> None:
    report = SlotManager(Forked(), max_rank=4).load(read_adapter(kohya(pairs({"d_e": 4}))))
    assert report.modules == ("d_e",)


def test_underscores_in_a_models_own_names_are_kept() -> None:
    model = nn.ModuleDict({"to_out": nn.ModuleList([nn.Linear(8, 6)]), "proj_in": nn.Linear(8, 6)})
    both = pairs({"to_out.0": 2, "proj_in": 2})
    report = SlotManager(model, max_rank=2).load(read_adapter(kohya(both)))
    assert report.modules == ("to_out.0", "proj_in")


def test_a_module_that_is_called_like_a_prefix_keeps_its_name() -> None:
    model = nn.ModuleDict(
        {"lora_te_gate": nn.Linear(8, 6), "unet": nn.ModuleList([nn.Linear(8, 6)])}
    )
    both = pairs({"lora_te_gate": 2, "unet.0": 2})
    report = SlotManager(model, max_rank=2).load(read_adapter(dotted(both)))
    assert report.modules == ("lora_te_gate", "unet.0")


# Names that are not there


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_te_"])
def test_names_of_which_none_matches_are_refused_with_samples_of_both_sides(prefix: str) -> None:
    tensors = kohya({f"other.{m}": both for m, both in PAIRS.items()}, 8, prefix)
    text = refusal(read_adapter(tensors), TargetMismatchError, "4 of the 4 modules")
    for layer in (0, 1):
        assert f"{prefix}other_model_layers_{layer}_q_proj" in text
        assert f"model.layers.{layer}.q_proj" in text
    assert text.count("no such module") == 3


def test_names_of_which_half_matches_are_refused_if_strict_and_else_reported() -> None:
    wrong = kohya({f"x.{Q}": PAIRS[Q]}, 8)
    raw = read_adapter({**kohya(PAIRS, 8), **wrong})
    refusal(raw, TargetMismatchError, "1 of the 5 modules .*lora_unet_x_model_layers_0_q_proj: no")
    report = SlotManager(toy(), max_rank=8).load(raw, strict=False)
    assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)
    assert report.skipped == (("lora_unet_x_model_layers_0_q_proj", "no such module in the model"),)


# What stands in the file beside the pairs


def test_a_convolutions_halves_are_read_in_their_own_shapes() -> None:
    tensors = {
        "lora_unet_conv.lora_down.weight": torch.ones(2, 7, 3, 3),
        "lora_unet_conv.lora_up.weight": torch.ones(5, 2, 1, 1),
        "lora_unet_conv.alpha": torch.tensor(2.0),
    }
    raw = read_adapter(tensors)
    assert raw.format == "kohya"
    assert raw.tensors.keys() == tensors.keys()


def test_two_tensors_for_one_part_under_two_spellings_are_refused() -> None:
    name = f"lora_unet_{Q.replace('.', '_')}"
    raw = read_adapter({**kohya(PAIRS), f"{name}.lora_A.weight": PAIRS[Q][0]})
    with pytest.raises(ValueError, match=f"has two lora_A tensors for '{name}'"):
        SlotManager(toy(), max_rank=8).load(raw)


@pytest.mark.parametrize("key", ["oft_blocks", "oft_diag", "on_input"])
def test_other_algorithms_of_lycoris_are_refused_by_name(key: str) -> None:
    tensors = {**kohya(PAIRS), f"lora_unet_x.{key}": torch.ones(2)}
    with pytest.raises(UnsupportedAdapterError, match=f"uses (OFT|IA3), as its key .*{key}"):
        read_adapter(tensors)


def test_inspecting_reads_the_header_of_a_kohya_file_with_its_scalings(tmp_path: Path) -> None:
    path = write_file(tmp_path / "any.safetensors", kohya(PAIRS, {Q: 1, V: 2}))
    info = inspect_adapter(path)
    assert info.format == "kohya"
    names = [f"lora_unet_{module.replace('.', '_')}" for module in TOY_MODULES]
    assert dict(info.scaling) == dict(zip(names, [0.25, 0.5, 1.0, 1.0], strict=True))
    assert dict(info.ranks) == dict.fromkeys(names, 4)


def test_a_manager_made_for_kohya_files_takes_them(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", kohya(pairs({Q: 5, V: 2}), 8))
    manager = SlotManager.from_adapters(toy(), [path])
    report = manager.load(path)
    assert (report.rank, report.modules) == (5, (Q, V))
    with pytest.raises(TargetMismatchError, match=r"layers\.1\.q_proj"):
        manager.load(read_adapter(TENSORS))


def test_a_shared_module_is_found_under_all_its_names() -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 6)})
    model["second"] = nn.ModuleList([model["first"]])
    report = SlotManager(model, max_rank=2).load(read_adapter(kohya(pairs({"second.0": 2}))))
    assert report.modules == ("first",)
