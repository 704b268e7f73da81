"""transformers models that were loaded quantised take adapters as PEFT's do, compiled too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_layers import hqq_layer, replace_linears
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig
from toys import TOKENS, peft_model, slot_buffers, write_adapter
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)

from lora_slots import SlotManager

CONFIGS: dict[str, Callable[[], Any]] = {
    "bitsandbytes 4-bit": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    # With a threshold, 8-bit layers compile anew whenever outliers in their input come and go.
    "bitsandbytes 8-bit": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "torchao int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "quanto int8": lambda: QuantoConfig(weights="int8"),
}
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 24, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 7, "lora_alpha": -9, "use_rslora": True, "target_modules": "all-linear"},
}


def build() -> LlamaForCausalLM:
    """A model whose sizes are multiples of the blocks of every kind."""
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=128,
        )
    ).eval()  # fmt: skip


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


class Files:
    """The tiny model and adapters for it, saved once."""

    def __init__(self, root: Path) -> None:
        self.model = root / "model"
        build().save_pretrained(self.model)
        self.adapters = {
            name: write_adapter(root / name, build(), **config) for name, config in ADAPTERS.items()
        }

    def load(self, kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        if kind == "hqq 4-bit":
            # transformers itself loads HQQ on no CPU.
            model = build().to(dtype)
            replace_linears(model.model, hqq_layer)
            return model.eval()
        return AutoModelForCausalLM.from_pretrained(
            self.model, quantization_config=CONFIGS[kind](), device_map={"": "cpu"}, dtype=dtype
        ).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("quantised"))


KINDS = [*CONFIGS, "hqq 4-bit"]


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_pefts_on_the_same_quantised_model(kind: str, files: Files) -> None:
    model = files.load(kind)
    base = run(model)
    manager = SlotManager(model, max_rank=8)
    assert {b.dtype for b in slot_buffers(model).values()} == {torch.float32}
    assert torch.equal(run(model), base)
    for path in files.adapters.values():
        manager.load(path)
        ours = run(model)
        theirs = run(peft_model(files.load(kind), path))
        largest = float(theirs.abs().max())
        # 8-bit activations: what differs in the last bit upstream may round to its neighbour.
        tolerance = 1e-2 if kind == "bitsandbytes 8-bit" else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * largest)
        assert float((theirs - base).abs().max()) > 0.05 * largest
    manager.unload("default")
    assert torch.equal(run(model), base)


@pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_models_swap_without_a_recompile(kind: str, files: Files) -> None:
    model, eager = files.load(kind, torch.bfloat16), files.load(kind, torch.bfloat16)
    managers = [SlotManager(each, max_rank=8) for each in (model, eager)]
    dtypes = {n.rpartition(".")[2]: b.dtype for n, b in slot_buffers(model).items()}
    # The 4-bit configuration above asks for float32.
    dtype = torch.float32 if kind == "bitsandbytes 4-bit" else torch.bfloat16
    assert dtypes == {"lora_A": dtype, "lora_B": dtype, "scaling": torch.float32}
    base = run(model)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    compiled = run(model)
    with managers[0].no_recompile():
        for path in (*files.adapters.values(), files.adapters["attention"]):
            for manager in managers:
                manager.load(path)
            ours, theirs = run(model), run(eager)
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(
                ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max())
            )
        managers[0].unload("default")
        assert torch.equal(run(model), compiled)
    torch.testing.assert_close(compiled, base, rtol=0.02, atol=0.02 * float(base.abs().max()))
