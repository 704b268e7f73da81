"""DoRA adapters beside others: mixes, hotswaps, weights, and what a slot remembers of the base."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from dora_files import dora_adapter, dora_output, dora_tensors, write_dora
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from toys import (
    TINY,
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    peft_model,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_input,
    write_adapter,
)

from lora_slots import SlotManager, read_adapter

PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


def slots(model: nn.Module, **options: int) -> SlotManager:
    return SlotManager(model, **{"max_rank": 8, "num_slots": 3, "dora": True, **options})


def share(
    model: nn.Module, tensors: dict[str, Tensor], scaling: float | dict[str, float]
) -> Tensor:
    """What one DoRA adapter adds to the output of `Toy`, by the maths."""
    rows, x = [], toy_input()
    if isinstance(scaling, float):
        scaling = dict.fromkeys(TOY_MODULES, scaling)
    for module in TOY_MODULES:
        weight = model.get_submodule(module).weight
        A, B, m = (tensors[f"base_model.model.{module}.{part}"] for part in PARTS)
        rows.append(dora_output(weight, x, A, B, scaling[module], m) - x @ weight.t())
    return torch.stack(rows).reshape(2, 2, 3, 6)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_active_dora_adapters_add_their_own_shares_in_any_order() -> None:
    one, two = dora_tensors(4, seed=1), dora_tensors(2, seed=2)
    base = toy()(toy_input())
    expected = base + share(toy(), one, 0.5 * 1.5) + share(toy(), two, -1.25 * 4)
    outputs = []
    for order in (("one", "two"), ("two", "one")):
        model = toy()
        manager = slots(model)
        sources = {
            "one": read_adapter(one, {"r": 4, "lora_alpha": 6, "use_dora": True}),
            "two": read_adapter(two, {"r": 2, "lora_alpha": 8, "use_dora": True}),
        }
        for name in order:
            manager.load(sources[name], name)
        manager.set_adapters(["one", "two"], [0.5, -1.25])
        assert_close(model(toy_input()), expected)
        outputs.append(model(toy_input()))
    assert_close(outputs[0], outputs[1])


def test_pefts_result_for_two_dora_adapters_depends_on_their_order(tmp_path: Path) -> None:
    tiny = TINY["llama"]
    paths = [
        write_dora(
            tmp_path / str(seed), tiny.build(), seed=seed, r=4, lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
        )
        for seed in (1, 2)
    ]  # fmt: skip
    theirs, ours = {}, {}
    for order in ((0, 1), (1, 0)):
        oracle = peft_model(tiny.build(), paths[0], adapter_name="0")
        oracle.load_adapter(paths[1], "1")
        oracle.base_model.set_adapter([str(index) for index in order])
        theirs[order] = tiny.run(oracle)
        model = tiny.build()
        manager = slots(model)
        for index in order:
            manager.load(paths[index], str(index))
        manager.set_adapters([str(index) for index in order])
        ours[order] = tiny.run(model)
    largest = float(theirs[0, 1].abs().max())
    assert float((theirs[0, 1] - theirs[1, 0]).abs().max()) > 1e-3 * largest
    torch.testing.assert_close(ours[0, 1], ours[1, 0], rtol=1e-5, atol=1e-5 * largest)


@torch.no_grad()
def test_a_plain_adapter_beside_a_dora_adapter_is_not_normalised() -> None:
    tensors, both = dora_tensors(4, seed=1), pairs(dict.fromkeys(TOY_MODULES, 2), seed=2)
    model = toy()
    manager = slots(model)
    manager.load(read_adapter(tensors_of(both), {"r": 2, "lora_alpha": 2}), "plain")
    manager.load(read_adapter(tensors, {"r": 4, "lora_alpha": 8, "use_dora": True}), "dora")
    manager.set_adapters(["plain", "dora"], [0.5, 2.0])
    plain = expected_toy(toy(), toy_input(), both, dict.fromkeys(TOY_MODULES, 0.5))
    assert_close(model(toy_input()), plain + share(toy(), tensors, 4.0))


def test_dora_first_in_peft_and_a_plain_one_after_it_agree_with_ours(tmp_path: Path) -> None:
    # PEFT's DoRA normalises what the layer has returned so far, so it must come first there.
    tiny = TINY["bert"]
    config = {"lora_alpha": 8, "target_modules": ["query", "value"]}
    dora = write_dora(tmp_path / "dora", tiny.build(), seed=1, r=4, **config)
    plain = write_adapter(tmp_path / "plain", tiny.build(), seed=2, r=3, **config)
    oracle = peft_model(tiny.build(), dora, adapter_name="dora")
    oracle.load_adapter(plain, "plain")
    oracle.base_model.set_adapter(["dora", "plain"])
    for module in oracle.modules():
        if isinstance(module, LoraLayer):
            module.scaling["plain"] *= -0.5
    model = tiny.build()
    manager = slots(model)
    manager.load(dora, "dora")
    manager.load(plain, "plain")
    manager.set_adapters(["dora", "plain"], [1, -0.5])
    theirs = tiny.run(oracle)
    torch.testing.assert_close(
        tiny.run(model), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max())
    )


Q_ONLY = TOY_MODULES[::2]
SOURCES = {
    "dora": lambda: dora_adapter(4, seed=1),
    "dora on few layers": lambda: dora_adapter(6, seed=2, modules=Q_ONLY),
    "plain": lambda: toy_adapter(8, seed=3),
}


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(toy_input())


def test_hotswaps_between_dora_and_plain_leave_nothing_behind_in_any_order() -> None:
    # A hotswap goes to the first free slot: to and fro between two.
    alone, buffers = {}, {}
    for name, make in SOURCES.items():
        model = toy()
        manager = slots(model)
        for slot in range(2):
            assert manager.load(make()).slot == slot
            alone[name, slot] = output(model)
            buffers[name, slot] = {key: b.clone() for key, b in slot_buffers(model).items()}
    model = toy()
    base = output(model)
    manager = slots(model)
    for order in itertools.permutations(SOURCES, 3):
        for name in (*order, order[0]):
            slot = manager.load(SOURCES[name]()).slot
            assert torch.equal(output(model), alone[name, slot]), (name, order)
            for key, buffer in slot_buffers(model).items():
                assert torch.equal(buffer, buffers[name, slot][key]), (key, name, order)
    manager.unload("default")
    assert torch.equal(output(model), base)
    for key, buffer in slot_buffers(model).items():
        assert not buffer.any(), key


def test_switching_weights_back_and_forth_is_exact_to_the_bit() -> None:
    model = toy()
    base = output(model)
    manager = slots(model)
    manager.load(dora_adapter(4))
    seen: dict[float, Tensor] = {0.0: base}
    for weight in (1.0, 0.5, 0.0, -1.5, 0.5, 1.0, 0.0, -1.5):
        manager.set_weight("default", weight)
        assert torch.equal(output(model), seen.setdefault(weight, output(model)))
    manager.disable_adapters()
    assert torch.equal(output(model), base)
    manager.enable_adapters()
    assert torch.equal(output(model), seen[-1.5])


@torch.no_grad()
def test_loads_and_weights_never_compound() -> None:
    # rsLoRA: 16 / sqrt(64) = 2, and half of that is 1.
    tensors = dora_tensors(64, seed=1)
    config = {"r": 64, "lora_alpha": 16, "use_rslora": True, "use_dora": True}
    model = toy()
    manager = slots(model, max_rank=64)
    buffers = []
    for _ in range(5):
        report = manager.load(read_adapter(tensors, config))
        assert set(report.scaling.values()) == {2.0}
        buffers.append({name: buffer.clone() for name, buffer in slot_buffers(model).items()})
    for name, buffer in buffers[0].items():
        # A hotswap goes to the other slot, and the next one back.
        assert all(torch.equal(buffer, later[name]) for later in buffers[2::2]), name
        assert torch.equal(buffers[1][name], buffers[3][name]), name
    for _ in range(10):
        manager.set_weight("default", 0.5)
    expected = toy()(toy_input()) + share(toy(), tensors, 1.0)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-4, atol=1e-4)


PATTERNS: dict[str, tuple[dict[str, object], dict[str, float]]] = {
    "alpha by suffix": ({"alpha_pattern": {"v_proj": 100}}, {"v_proj": 25.0}),
    "alpha by anchor": ({"alpha_pattern": {"^v_proj": 100, "^model.layers.1.v_proj": 6}},
                        {"1.v_proj": 1.5}),
    "first key wins": ({"alpha_pattern": {"1.v_proj": 40, "v_proj": 100}},
                       {"0.v_proj": 25.0, "1.v_proj": 10.0}),
    "no substring": ({"alpha_pattern": {"_proj": 100}}, {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:alpha_pattern in the config:UserWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_norms_are_of_the_update_under_each_modules_own_scaling(pattern: str) -> None:
    config, changed = PATTERNS[pattern]
    tensors, model = dora_tensors(4, seed=1), toy()
    manager = slots(model)
    report = manager.load(
        read_adapter(tensors, {"r": 4, "lora_alpha": 8, "use_dora": True, **config})
    )
    scaling = {
        module: next((s for end, s in changed.items() if module.endswith(end)), 2.0)
        for module in TOY_MODULES
    }
    assert report.scaling == scaling
    expected = toy()(toy_input()) + share(toy(), tensors, scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-4, atol=1e-4)


def test_alpha_0_leaves_the_magnitude_over_the_norm_of_the_base() -> None:
    # As PEFT does: the direction is that of the base, the length is the adapter's.
    model = toy()
    tensors = dora_tensors(4, seed=1)
    slots(model).load(read_adapter(tensors, {"r": 4, "lora_alpha": 0, "use_dora": True}))
    with torch.no_grad():
        assert_close(model(toy_input()), toy()(toy_input()) + share(toy(), tensors, 0.0))


@torch.no_grad()
def test_sums_are_of_the_base_weight_at_the_time_of_the_load() -> None:
    # A base weight that changes later needs the adapter to be loaded again; the docs say so.
    tensors = dora_tensors(4, seed=1)
    source = read_adapter(tensors, {"r": 4, "lora_alpha": 8, "use_dora": True})
    model, other = toy(), toy(seed=5)
    manager = slots(model)
    manager.load(source)
    model.load_state_dict(other.state_dict())
    expected = other(toy_input()) + share(other, tensors, 2.0)
    assert not torch.allclose(model(toy_input()), expected, rtol=1e-3, atol=1e-3)
    manager.load(source)
    assert_close(model(toy_input()), expected)


@torch.no_grad()
def test_neither_the_base_nor_the_callers_tensors_are_written_or_kept() -> None:
    model, tensors = toy(), dora_tensors(4, seed=1)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    manager = slots(model)
    manager.load(read_adapter(tensors, {"r": 4, "lora_alpha": 8, "use_dora": True}))
    assert all(torch.equal(tensors[key], before[key]) for key in before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
    snapshot = Snapshot.of(manager, model)
    for tensor in tensors.values():
        tensor.zero_()
    snapshot.assert_unchanged(manager, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sums_are_of_what_the_buffers_hold_not_of_the_file(dtype: torch.dtype) -> None:
    # A and B are rounded to the buffers' dtype; the norm is that of the rounded update.
    model = toy()
    SlotManager(model, max_rank=4, dora=True, dtype=dtype).load(dora_adapter(4, seed=1))
    layer = model.model.layers[0].q_proj
    A, B, dora = (layer.lora_slots.get_buffer(name) for name in ("lora_A", "lora_B", "dora"))
    assert (A.dtype, dora.dtype) == (dtype, torch.float32)
    update = 1.5 * B.double().t() @ A.double()
    W = layer.weight.detach().double()
    expected = torch.stack([W.square().sum(1), (W * update).sum(1), update.square().sum(1)])
    torch.testing.assert_close(dora[1:].double(), expected, rtol=1e-5, atol=1e-6)
