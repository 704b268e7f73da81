"""Small models, adapters written by PEFT for them, and PEFT's own answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_slots import Counts, LoraSlotsError, RawAdapter, SlotManager, read_adapter
from lora_slots.layers import Mix


class ToyLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(inputs, outputs, bias=bias)
        self.v_proj = nn.Linear(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.q_proj(x), self.v_proj(x)])


class Toy(nn.Module):
    """``model.layers.{0,1}.{q_proj,v_proj}``; the output shows every projection on its own."""

    def __init__(
        self, inputs: int = 8, outputs: int = 6, layers: int = 2, bias: bool = False
    ) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(ToyLayer(inputs, outputs, bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.model.layers])


def toy(seed: int = 0, **sizes: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**sizes).eval()


TOY_MODULES = tuple(
    f"model.layers.{layer}.{name}" for layer in range(2) for name in ("q_proj", "v_proj")
)


def toy_input(rows: int = 3) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Tiny:
    """A tiny random model of a real architecture: a fresh copy, and one forward to one tensor."""

    name: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]
    attention: tuple[str, ...]


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return build().eval()

    return make


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=128,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=128,
        )
    )  # fmt: skip


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, vocab_size=128,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


TOKENS = torch.arange(12).reshape(2, 6) * 5 % 128


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def _hidden(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).last_hidden_state


def _seq2seq(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :4]).logits


TINY = {
    tiny.name: tiny
    for tiny in (
        Tiny("llama", _seeded(_llama), _logits, ("q_proj", "v_proj")),
        Tiny("gpt2", _seeded(_gpt2), _logits, ("c_attn", "c_proj")),
        Tiny("bert", _seeded(_bert), _hidden, ("query", "value")),
        Tiny("t5", _seeded(_t5), _seq2seq, ("q", "v")),
    )
}


def write_adapter(path: Path, model: nn.Module, *, seed: int = 0, **config: Any) -> Path:
    """Let PEFT make and save a random adapter for ``model``, which it changes."""
    torch.manual_seed(seed)
    # PEFT warns where a GPT-2 style Conv1D is not announced.
    is_gpt2 = any(type(module).__name__ == "Conv1D" for module in model.modules())
    config = {"init_lora_weights": False, "fan_in_fan_out": is_gpt2, **config}
    get_peft_model(model, LoraConfig(**config)).save_pretrained(path)
    return path


def peft_model(model: nn.Module, path: Path, **kwargs: Any) -> PeftModel:
    """The oracle: ``model`` with the adapter at ``path``, by PEFT, eager."""
    return PeftModel.from_pretrained(model, path, **kwargs).eval()


Pairs = Mapping[str, tuple[Tensor, Tensor]]


def pairs(
    ranks: Mapping[str, int], *, inputs: int = 8, outputs: int = 6, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Random ``(A [r, in], B [out, r])`` for each module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        module: (
            torch.randn(rank, inputs, generator=generator),
            torch.randn(outputs, rank, generator=generator),
        )
        for module, rank in ranks.items()
    }


def tensors_of(pairs: Pairs, prefix: str = "base_model.model.") -> dict[str, Tensor]:
    return {
        f"{prefix}{module}.lora_{side}.weight": tensor
        for module, both in pairs.items()
        for side, tensor in zip("AB", both, strict=True)
    }


def write_folder(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> Path:
    """A PEFT folder with exactly these tensors and exactly this config (None: no config file)."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path / WEIGHTS)
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return path


WEIGHTS = "adapter_model.safetensors"


def toy_folder(path: Path, rank: int = 4, *, seed: int = 0, **config: Any) -> Path:
    """A PEFT folder for `Toy` on all four projections."""
    settings = {"r": rank, "lora_alpha": 8, **config}
    return write_folder(
        path, tensors_of(pairs(dict.fromkeys(TOY_MODULES, rank), seed=seed)), settings
    )


def expected_toy(model: Toy, x: Tensor, pairs: Pairs, scaling: Mapping[str, float]) -> Tensor:
    """What `Toy` must return: base(x) + scaling * B A x, module by module, in float64."""
    rows = []
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj"):
            module = f"model.layers.{index}.{name}"
            y = x.double() @ getattr(layer, name).weight.double().T
            if module in pairs:
                A, B = (tensor.double() for tensor in pairs[module])
                y = y + scaling[module] * (x.double() @ A.T @ B.T)
            rows.append(y)
    return torch.stack(rows).reshape(len(model.model.layers), 2, *rows[0].shape).float()


@dataclass(frozen=True)
class Snapshot:
    """Everything that a failed call must leave as it was."""

    buffers: dict[str, Tensor]
    loaded: tuple[str, ...]
    active: tuple[str, ...]
    status: str

    @classmethod
    def of(cls, manager: SlotManager, model: nn.Module) -> Snapshot:
        tensors = slot_buffers(model) | mix_tables(model)
        buffers = {name: tensor.clone() for name, tensor in tensors.items()}
        return cls(buffers, manager.loaded_adapters, manager.active_adapters, holdings(manager))

    def assert_unchanged(self, manager: SlotManager, model: nn.Module) -> None:
        now = Snapshot.of(manager, model)
        assert now.buffers.keys() == self.buffers.keys()
        for name, before in self.buffers.items():
            assert torch.equal(before, now.buffers[name]), name
        assert (now.loaded, now.active, now.status) == (self.loaded, self.active, self.status)


def holdings(manager: SlotManager) -> str:
    """The status, printed, less counts and times: those of an interrupted change may be missing."""
    status = manager.status()
    slots = tuple(replace(slot, swap_seconds=None, last_used=None) for slot in status.slots)
    cache = replace(status.cache, hits=0, misses=0)
    return str(replace(status, slots=slots, cache=cache, counts=Counts()))


MIX = ("rows", "slots", "owners")


def slot_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Every buffer of every slot layer, by name."""
    own = {name: b for name, b in model.named_buffers() if ".lora_slots." in f".{name}"}
    return {name: buffer for name, buffer in own.items() if ".mix." not in name}


def mix_tables(model: nn.Module) -> dict[str, Tensor]:
    """The weights and owners that slot layers share, by name."""
    mixes = {name: m for name, m in model.named_modules() if isinstance(m, Mix)}
    return {f"{n}.{kind}": getattr(m, kind) for n, m in mixes.items() for kind in MIX}


def scaling_in(module: nn.Module, rank: int) -> float:
    """What multiplies the one slot of ``module``: one value in its first ``rank`` rows, else 0."""
    scaling = module.lora_slots.by_row()
    assert scaling.dtype == torch.float32
    assert torch.equal(scaling[0, rank:], torch.zeros_like(scaling[0, rank:]))
    assert len(set(scaling[0, :rank].tolist())) == 1
    return scaling[0, 0].item()


def refusal(
    source: Any,
    error: type[LoraSlotsError],
    message: str,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
) -> str:
    """Check and load ``source`` over a live adapter of `Toy`: both must raise, and change nothing.

    Returns the error's text, in which ``message`` was found.
    """
    model = toy()
    manager = SlotManager(model, max_rank=8, dtype=dtype)
    live = pairs(dict.fromkeys(TOY_MODULES, 8), seed=9)
    manager.load(read_adapter(tensors_of(live)))
    before = Snapshot.of(manager, model)
    with pytest.raises(error, match=message) as raised:
        manager.check(source, strict=strict)
    before.assert_unchanged(manager, model)
    with pytest.raises(error, match=message):
        manager.load(source, strict=strict)
    before.assert_unchanged(manager, model)
    # What failed is no obstacle to the next load.
    assert manager.load(read_adapter(tensors_of(pairs({TOY_MODULES[0]: 1})))).rank == 1
    return str(raised.value)


class CountingBackend:
    """A backend that runs graphs eagerly and counts how many it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def toy_adapter(
    rank: int = 4,
    *,
    alpha: float = 8,
    modules: Iterable[str] = TOY_MODULES,
    seed: int = 0,
    **sizes: int,
) -> RawAdapter:
    """A random adapter in memory, for these modules of `Toy`."""
    tensors = tensors_of(pairs(dict.fromkeys(modules, rank), seed=seed, **sizes))
    return read_adapter(tensors, {"r": rank, "lora_alpha": alpha})


def places(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor every slot buffer and shared table is, and where its memory begins."""
    tensors = slot_buffers(model) | mix_tables(model)
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}


class Block(nn.Module):
    """One layer with a bias and one without; any number of blocks is a model."""

    def __init__(self, size: int = 16, *, residual: bool = True) -> None:
        super().__init__()
        self.residual = residual
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + y if self.residual else y


def blocks(
    count: int = 2, *, seed: int = 0, size: int = 16, residual: bool = True
) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(size, residual=residual) for _ in range(count))).eval()


def block_adapter(
    rank: int = 4, *, alpha: float = 8, count: int = 2, seed: int = 0, size: int = 16
) -> RawAdapter:
    """A random adapter in memory for every layer of `blocks`."""
    ups = pairs({f"{i}.up": rank for i in range(count)}, inputs=size, outputs=2 * size, seed=seed)
    downs = pairs(
        {f"{i}.down": rank for i in range(count)}, inputs=2 * size, outputs=size, seed=seed + 1000
    )
    return read_adapter(tensors_of(ups | downs), {"r": rank, "lora_alpha": alpha})


# Importing inductor, as its first compile does, runs a function that torch itself has deprecated.
INDUCTOR_WARNING = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
