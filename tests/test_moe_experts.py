"""The experts of a mixture lie in one parameter; PEFT's ``target_parameters`` act on it."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from mixtures import ALL, Experts, X, by_peft, manager_of, mixture, write
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import WEIGHTS, Snapshot, peft_model, tensors_of, write_folder

from lora_slots import (
    AdapterFileError,
    RankTooLargeError,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)

# PEFT looks for patterns among the names of modules only, but applies them to parameters, too.
pytestmark = pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")


@torch.no_grad()
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("parameters", [ALL[:2], ALL[1::-1], ALL[:1], ALL[1:2], ALL[2:], ALL])
@pytest.mark.parametrize("with_config", [True, False])
def test_the_output_is_that_of_peft(is_transposed, parameters, with_config, tmp_path):
    path = write(tmp_path / "a", mixture(is_transposed), parameters, r=3, lora_alpha=3)
    expected = by_peft(path, mixture(is_transposed))
    model = mixture(is_transposed)
    base = model(X)
    manager = manager_of(model)
    assert torch.equal(model(X), base)
    source = path if with_config else read_adapter(load_file(path / WEIGHTS))
    report = manager.load(source)
    assert report.rank == 3
    assert set(report.modules) == {"q_proj", *parameters}
    torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-5)
    manager.verify(lambda: model(X))
    manager.set_weight("default", 0.0)
    assert torch.equal(model(X), base)
    manager.unload("default")
    assert torch.equal(model(X), base)
    manager.detach()
    assert torch.equal(model(X), base)


@torch.no_grad()
def test_ranks_are_rows_and_each_expert_has_its_own_columns(tmp_path):
    path = write(tmp_path / "a", mixture(), ALL[:1])
    model = mixture()
    manager_of(model).load(path)
    slots = model.experts.lora_slots["up"]
    assert slots.lora_A.shape == (4, 3 * 8)
    assert slots.lora_B.shape == (4, 3 * 10)
    tensors = load_file(path / WEIGHTS)
    A, B = (tensors[f"base_model.model.experts.lora_{side}.weight"] for side in "AB")
    A, B = A.reshape(3, 2, 8), B.reshape(10, 2, 3)
    assert torch.equal(slots.lora_A[:2].view(2, 3, 8), A.transpose(0, 1))
    assert torch.equal(slots.lora_B[:2].view(2, 3, 10), B.permute(1, 2, 0))
    for expert in range(3):
        update = 3 * B[:, :, expert] @ A[expert]
        expected = mixture().experts.up[expert] + update
        torch.testing.assert_close(model.experts.up[expert], expected)


@torch.no_grad()
def test_patterns_of_the_config_speak_of_the_parameters(tmp_path):
    patterns = {"rank_pattern": {"experts.down": 3}, "alpha_pattern": {"experts.up": 1}}
    path = write(tmp_path / "a", mixture(), **patterns)
    model = mixture()
    report = manager_of(model).load(path)
    assert report.scaling == {"q_proj": 3.0, "experts.up": 0.5, "experts.down": 2.0}
    torch.testing.assert_close(model(X), by_peft(path, mixture()), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_transformers_is_that_of_peft(name, tmp_path):
    model, router = _qwen3() if name == "qwen3_moe" else _gpt_oss()
    tokens = torch.arange(12).reshape(2, 6)
    paths = {}
    for key, names in {
        "experts": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "router": ["mlp.experts.down_proj", router],
    }.items():
        paths[key] = write(tmp_path / key, copy.deepcopy(model), names)
    expected = {
        key: peft_model(copy.deepcopy(model), path)(tokens).logits for key, path in paths.items()
    }
    base = model(tokens).logits
    manager = SlotManager.from_adapters(model, list(paths.values()))
    assert torch.equal(model(tokens).logits, base)
    for key in ("experts", "router", "experts"):
        assert manager.load(paths[key]).rank == 2
        torch.testing.assert_close(model(tokens).logits, expected[key], rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(model(tokens).logits, base)


def _qwen3() -> tuple[nn.Module, str]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=32, num_experts=3,
        num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval(), "mlp.gate.weight"


def _gpt_oss() -> tuple[nn.Module, str]:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(3)
    config = GptOssConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=32, num_local_experts=3,
        num_experts_per_tok=2,
    )  # fmt: skip
    return GptOssForCausalLM(config).eval(), "mlp.router.weight"


@torch.no_grad()
def test_a_rank_that_is_too_large_is_that_of_one_expert(tmp_path):
    path = write(tmp_path / "a", mixture(), r=5)
    manager = manager_of(mixture())
    with pytest.raises(RankTooLargeError, match=r"has rank 5 at .*, but max_rank is 4"):
        manager.load(path)


def test_what_was_not_chosen_is_refused_by_the_parameters_name_or_left_out(tmp_path):
    path = write(tmp_path / "a", mixture())
    model = mixture()
    manager = manager_of(model, targets=["q_proj", "experts.down"])
    before = Snapshot.of(manager, model)
    match = r"experts\.up: is a parameter that is not among the target modules"
    with pytest.raises(TargetMismatchError, match=match):
        manager.load(path)
    before.assert_unchanged(manager, model)
    report = manager.load(path, strict=False)
    assert report.modules == ("q_proj", "experts.down")
    assert [key for key, _ in report.skipped] == ["base_model.model.experts.up"]


def test_naming_the_module_alone_says_what_to_name():
    match = r"target module experts is Experts; .*if they are named: experts\.up, experts\.down"
    with pytest.raises(TargetMismatchError, match=match):
        manager_of(mixture(), targets=["experts"])


def experts(**shapes: tuple[int, int]) -> dict[str, Tensor]:
    """Pairs by level (``outer``, ``inner``) of the module ``experts``: widths of A and B."""
    names = {"outer": "experts", "inner": "experts.base_layer"}
    return tensors_of(
        {names[level]: (torch.ones(6, a), torch.ones(b, 6)) for level, (a, b) in shapes.items()}
    )


def test_what_cannot_be_settled_is_refused():
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()
            self.experts.down = nn.Parameter(torch.ones(3, 10, 8))

    model = Square()
    manager = SlotManager(model, max_rank=4, target_modules=["up", "down"])
    before = Snapshot.of(manager, model)
    up = experts(outer=(8, 10))
    config = {"r": 2, "target_parameters": ["experts.up"]}
    for tensors, settings, error, match in (
        (up, None, UnsupportedAdapterError, r"may be for its parameters up or down; only a config"),
        (experts(outer=(7, 10)), None, TargetMismatchError, r"3 experts with in_features=8 and"),
        (experts(outer=(8, 10), inner=(8, 10)), config, AdapterFileError,
         r"name 1 parameters of .*experts \(up\), but there are tensors for 2"),
        (experts(inner=(8, 10)), config, AdapterFileError, r"wraps .*experts 2 times, but has"),
        ({**up, "base_model.model.experts.lora_magnitude_vector": torch.ones(10)}, config,
         UnsupportedAdapterError, r"uses DoRA on .*experts\.up, a parameter"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            manager.load(read_adapter(tensors, settings))
        before.assert_unchanged(manager, model)
    manager.load(read_adapter(up, config))


def test_a_config_with_target_parameters_alone_is_no_obstacle(tmp_path):
    path = write(tmp_path / "a", mixture(), ALL[2:], target_modules=[])
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.gate"]
    again = write_folder(tmp_path / "b", load_file(path / WEIGHTS), config)
    assert manager_of(mixture()).load(again).modules == ("experts.gate",)
