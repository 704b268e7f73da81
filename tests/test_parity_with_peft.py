"""After a load, the output is PEFT's for the same files, whatever was loaded before."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from toys import (
    TINY,
    TOKENS,
    TOY_MODULES,
    Tiny,
    expected_toy,
    pairs,
    peft_model,
    tensors_of,
    toy,
    toy_input,
    write_adapter,
    write_folder,
)

from lora_slots import SlotManager, read_adapter

MLP = {
    "llama": ["gate_proj", "up_proj", "down_proj"],
    "gpt2": r".*\.mlp\.(c_fc|c_proj)",
    "bert": r".*\.(intermediate|output)\.dense",
    "t5": ["wi", "wo"],
}

# Few layers and many, disjoint ones, and all; ranks and alphas that are never equal.
ADAPTERS: dict[str, Callable[[Tiny], dict[str, Any]]] = {
    "attention, rank 1, alpha 1536": lambda tiny: {
        "r": 1, "lora_alpha": 1536, "target_modules": list(tiny.attention),
    },
    "mlp, rank 7, fractional alpha": lambda tiny: {
        "r": 7, "lora_alpha": 3.5, "target_modules": MLP[tiny.name],
    },
    "all layers, rank 13, negative alpha": lambda tiny: {
        "r": 13, "lora_alpha": -8, "target_modules": "all-linear",
    },
    "all layers, rank 64, rsLoRA": lambda tiny: {
        "r": 64, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear",
    },
    "all layers, patterns of rank and alpha": lambda tiny: {
        "r": 4, "lora_alpha": 6, "target_modules": "all-linear",
        "rank_pattern": {tiny.attention[0]: 11, rf".*\.1\..*\.{tiny.attention[1]}": 2},
        "alpha_pattern": {tiny.attention[1]: 40, rf".*\.0\..*\.{tiny.attention[0]}": 0.5},
    },
}  # fmt: skip
ORDERED = list(ADAPTERS)[:4]


class Oracle:
    """Adapter files that PEFT wrote and PEFT's own output for each, made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = functools.cache(self._path)
        self.output = functools.cache(self._output)

    def _path(self, tiny: str, adapter: str) -> Path:
        path = self.root / tiny / str(list(ADAPTERS).index(adapter))
        config = ADAPTERS[adapter](TINY[tiny])
        return write_adapter(path, TINY[tiny].build(), seed=len(adapter), **config)

    def _output(self, tiny: str, adapter: str) -> Tensor:
        return TINY[tiny].run(peft_model(TINY[tiny].build(), self.path(tiny, adapter)))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("adapters"))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    atol = 1e-5 * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


def assert_changed(ours: Tensor, base: Tensor) -> None:
    """The adapter is far from nothing, so that agreeing about it means something."""
    assert float((ours - base).abs().max()) > 0.01 * float(base.abs().max())


def manager_of(model: nn.Module, **options: Any) -> SlotManager:
    return SlotManager(model, **{"max_rank": 64, **options})


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY.keys())
def test_output_after_a_load_is_pefts(tiny: Tiny, adapter: str, oracle: Oracle) -> None:
    model = tiny.build()
    base = tiny.run(model)
    manager_of(model).load(oracle.path(tiny.name, adapter))
    ours = tiny.run(model)
    assert_close(ours, oracle.output(tiny.name, adapter))
    assert_changed(ours, base)


@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY.keys())
def test_output_is_pefts_after_loads_in_every_order_into_one_slot(
    tiny: Tiny, oracle: Oracle
) -> None:
    model = tiny.build()
    manager = manager_of(model)
    alone: dict[str, Tensor] = {}
    for order in itertools.permutations(ORDERED, 3):
        for adapter in order:
            manager.load(oracle.path(tiny.name, adapter))
            ours = tiny.run(model)
            assert_close(ours, oracle.output(tiny.name, adapter))
            assert torch.equal(ours, alone.setdefault(adapter, ours)), (adapter, order)


@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY.keys())
def test_two_active_adapters_with_weights_add_up_as_in_peft(tiny: Tiny, oracle: Oracle) -> None:
    first, second = list(ADAPTERS)[3], list(ADAPTERS)[4]
    theirs = peft_model(tiny.build(), oracle.path(tiny.name, first), adapter_name="first")
    theirs.load_adapter(oracle.path(tiny.name, second), "second")
    theirs.base_model.set_adapter(["first", "second"])
    for module in theirs.modules():
        if isinstance(module, LoraLayer):
            module.scaling["first"] *= 0.7
            module.scaling["second"] *= -1.5

    model = tiny.build()
    manager = manager_of(model, num_slots=3)
    manager.load(oracle.path(tiny.name, first), "first")
    manager.load(oracle.path(tiny.name, ORDERED[0]), "idle")
    manager.load(oracle.path(tiny.name, second), "second")
    manager.set_adapters(["second", "first"], [-1.5, 0.7])
    assert_close(tiny.run(model), tiny.run(theirs))


# PEFT tells of what it stores beside a head, that merging would break the tie, and that one flag
# does not suit every layer.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("tiny", [TINY["gpt2"], TINY["llama"]], ids=["gpt2", "llama"])
def test_adapter_on_a_tied_head_is_pefts_and_leaves_the_embeddings_alone(
    tiny: Tiny, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        model = tiny.build()
        model.config.tie_word_embeddings = True
        model.tie_weights()
        return model

    config = {"r": 5, "lora_alpha": 40, "target_modules": ["lm_head", tiny.attention[0]]}
    path = write_adapter(tmp_path / "head", build(), **config)
    theirs = tiny.run(peft_model(build(), path))
    model = build()
    base, embedded = tiny.run(model), model.get_input_embeddings()(TOKENS)
    manager = manager_of(model, target_modules=config["target_modules"])
    assert model.lm_head.weight is model.get_input_embeddings().weight
    report = manager.load(path)
    assert "lm_head" in report.modules
    assert_close(tiny.run(model), theirs)
    assert_changed(theirs, base)
    assert torch.equal(model.get_input_embeddings()(TOKENS), embedded)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    manager.unload("default")
    assert torch.equal(tiny.run(model), base)


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_fan_in_fan_out_changes_nothing_on_conv1d(fan_in_fan_out: bool, oracle: Oracle) -> None:
    tiny, adapter = TINY["gpt2"], "all layers, rank 13, negative alpha"
    path = oracle.path("gpt2", adapter)
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is True
    model = tiny.build()
    tensors = read_adapter(path).tensors
    manager_of(model).load(
        read_adapter(tensors, config={**config, "fan_in_fan_out": fan_in_fan_out})
    )
    assert_close(tiny.run(model), oracle.output("gpt2", adapter))


def _conv1d(inputs: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.weight)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(8, 6),
    "Linear without bias": lambda: nn.Linear(8, 6, bias=False),
    "Conv1D": lambda: _conv1d(8, 6),
    "square Conv1D": lambda: _conv1d(8, 8),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "1-D": lambda: torch.randn(8),
    "2-D": lambda: torch.randn(3, 8),
    "3-D": lambda: torch.randn(2, 3, 8),
    "4-D": lambda: torch.randn(2, 1, 3, 8),
    "transposed": lambda: torch.randn(8, 3).t(),
    "expanded": lambda: torch.randn(1, 8).expand(4, 8),
    "empty batch": lambda: torch.randn(0, 8),
    "empty sequence": lambda: torch.randn(2, 0, 8),
}


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_layer_adds_scaling_times_b_a_x_to_inputs_of_every_shape(kind: str, shape: str) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(LAYERS[kind]()), INPUTS[shape]()
    base = model(x)
    manager = SlotManager(model, max_rank=4)
    assert torch.equal(model(x), base)
    outputs = base.shape[-1]
    A, B = pairs({"0": 3}, outputs=outputs)["0"]
    manager.load(read_adapter(tensors_of({"0": (A, B)}), {"r": 3, "lora_alpha": 12}))
    y = model(x)
    assert (y.shape, y.dtype) == (base.shape, base.dtype)
    torch.testing.assert_close(y, base + 4 * (x @ A.t() @ B.t()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_layer_takes_its_input_by_keyword_as_well(kind: str) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(LAYERS[kind]()), torch.randn(3, 8)
    base = model[0](x)
    manager = SlotManager(model, max_rank=4)
    keyword = "x" if "Conv1D" in kind else "input"
    assert torch.equal(model[0](**{keyword: x}), base)
    manager.load(read_adapter(tensors_of(pairs({"0": 3}, outputs=base.shape[-1]))))
    assert torch.equal(model[0](**{keyword: x}), model[0](x))
    assert_changed(model[0](**{keyword: x}), base)


@torch.no_grad()
def test_layers_with_bias_keep_it_unscaled(tmp_path: Path) -> None:
    both = pairs(dict.fromkeys(TOY_MODULES, 4))
    path = write_folder(
        tmp_path / "bias", tensors_of(both),
        {"r": 4, "lora_alpha": 40, "target_modules": ["q_proj", "v_proj"]},
    )  # fmt: skip
    model, x = toy(bias=True), toy_input()
    bias = torch.stack(
        [torch.stack([layer.q_proj.bias, layer.v_proj.bias]) for layer in model.model.layers]
    )
    expected = expected_toy(model, x, both, dict.fromkeys(TOY_MODULES, 10.0)) + bias[:, :, None]
    manager_of(model).load(path)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-4)
    assert_close(model(x), peft_model(toy(bias=True), path)(x))
