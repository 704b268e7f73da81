"""Only dense tensors with data are loaded; any other is refused, whatever it is a part of."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import TOY_MODULES, pairs, refusal, tensors_of

from lora_slots import AdapterFileError, SlotManager, read_adapter

MODULE = f"base_model.model.{TOY_MODULES[0]}"
TENSORS = tensors_of(pairs({TOY_MODULES[0]: 4})) | {
    f"{MODULE}.lora_magnitude_vector": torch.ones(6),
    f"{MODULE}.lora_B.bias": torch.ones(6),
    f"{MODULE}.alpha": torch.ones(1),
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "has no values, since it is on the meta device": lambda tensor: tensor.to("meta"),
    "is sparse or nested": lambda tensor: tensor.to_sparse(),
}


@pytest.mark.parametrize("key", TENSORS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strict", [True, False])
def test_other_tensors(key: str, kind: str, strict: bool) -> None:
    source = read_adapter(TENSORS | {key: KINDS[kind](TENSORS[key])})
    text = refusal(source, AdapterFileError, kind, strict=strict)
    assert text.startswith(f"{key} in adapter <tensors in memory>")


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 2), (torch.bfloat16, 32)])
def test_layers_without_inputs_or_outputs_take_adapters_like_others(
    dtype: torch.dtype, rank: int
) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 0), nn.Linear(0, 3, bias=False))
    model.to(dtype)
    manager = SlotManager(model, max_rank=rank)
    sizes = [(layer.in_features, layer.out_features) for layer in model]
    tensors = {}
    for number, (inputs, outputs) in enumerate(sizes):
        tensors[f"base_model.model.{number}.lora_A.weight"] = torch.ones(rank, inputs, dtype=dtype)
        tensors[f"base_model.model.{number}.lora_B.weight"] = torch.ones(outputs, rank, dtype=dtype)
    x = torch.ones(1, 0, dtype=dtype)
    base = model(x)
    manager.load(read_adapter(tensors, {"r": rank}))
    assert torch.equal(model(x), base)
    manager.unload("default")
    assert torch.equal(model(x), base)
