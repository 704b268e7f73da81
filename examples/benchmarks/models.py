"""What is measured: models of linears, adapters for them, and PEFT's side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

_DIGITS = 8


@dataclass(frozen=True)
class Shape:
    """The size of a model: ``layers`` of seven linears."""

    layers: int
    hidden: int
    mlp: int
    dtype: torch.dtype

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """``(in, out)`` of every linear of a layer."""
        square, up, down = (self.hidden, self.hidden), (self.hidden, self.mlp), self.mlp
        attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), square)
        return attention | {"gate_proj": up, "up_proj": up, "down_proj": (down, self.hidden)}


Weights = list[dict[str, nn.Parameter]]


class Block(nn.Module):
    """Seven linears, wired like a decoder layer without its attention."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Share ``weights``, so that all contenders read the same memory."""
        super().__init__()
        for name, weight in weights.items():
            linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
            linear.weight = weight
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        x = F.rms_norm(x, x.shape[-1:])
        x = x + self.o_proj(self.q_proj(x) * torch.sigmoid(self.k_proj(x)) + self.v_proj(x))
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def run_block(block: nn.Module, x: Tensor) -> Tensor:
    """``[..., hidden]`` to ``[..., hidden]``."""
    return block(x)


class Model(nn.Module):
    """A stack of blocks.

    Attributes:
        run_block: What runs each of them: `run_block`, or a compiled one.
    """

    def __init__(self, weights: Weights) -> None:
        """One block for each entry of ``weights``."""
        super().__init__()
        self.layers = nn.ModuleList(Block(each) for each in weights)
        self.run_block = run_block

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        for layer in self.layers:
            x = self.run_block(layer, x)
        return x


def compiled(
    model: nn.Module, device: torch.device, *, backend: str = "inductor"
) -> Callable[..., Tensor]:
    """What runs a `Model`, or PEFT's around one, compiled; the model itself is changed.

    On a CPU its blocks share one graph, so that it compiles in seconds. On a GPU the whole is
    compiled, with ``mode="reduce-overhead"``, so that a forward is one CUDA graph. Either way
    graphs of one model never make Dynamo look longer for those of another.
    """
    options = {"backend": backend, "dynamic": False, "isolate_recompiles": True}
    # The graphs of every list of names, under PEFT, are more than the eight that are allowed.
    options["recompile_limit"] = 64
    if device.type == "cuda":
        whole = torch.compile(model, mode="reduce-overhead", **options)

        def step(*args: object, **kwargs: object) -> Tensor:
            # The output of the forward before may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
            return whole(*args, **kwargs)

        return step
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    inner.run_block = torch.compile(run_block, fullgraph=True, **options)
    return model


def base_weights(shape: Shape, device: torch.device, *, alike: bool = False) -> Weights:
    """Random weights of the size that keeps activations near 1.

    ``alike`` gives all layers the same memory, where forwards are not what is measured.
    """
    torch.manual_seed(0)

    def values(inputs: int, outputs: int) -> Tensor:
        noise = torch.randn(outputs, inputs, dtype=shape.dtype, device=device)
        return noise * 0.5 * inputs**-0.5

    def layer() -> dict[str, Tensor]:
        return {name: values(*sizes) for name, sizes in shape.linears.items()}

    layers = [layer()] * shape.layers if alike else [layer() for _ in range(shape.layers)]
    return [
        {name: nn.Parameter(each, requires_grad=False) for name, each in weights.items()}
        for weights in layers
    ]


def write_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> Path:
    """A PEFT folder with all seven linears of every layer at ``rank``.

    Its tensors are pieces of one stretch of noise: to draw hundreds of millions of numbers would
    take longer than everything that is measured.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = rank * max(shape.hidden, shape.mlp)
    noise = (torch.randn(longest + 4096, generator=generator) * 0.01).to(shape.dtype)

    def piece(*size: int) -> Tensor:
        count = size[0] * size[1]
        start = int(torch.randint(len(noise) - count, (), generator=generator))
        return noise[start : start + count].clone().view(size)

    tensors = {
        f"base_model.model.layers.{layer}.{name}.lora_{side}.weight": tensor
        for layer in range(shape.layers)
        for name, (inputs, outputs) in shape.linears.items()
        for side, tensor in (("A", piece(rank, inputs)), ("B", piece(outputs, rank)))
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"number": f"{0:0{_DIGITS}}"})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(shape.linears))
    config.save_pretrained(str(folder))
    return folder


def change_header(folder: Path, number: int) -> None:
    """Let the header of an adapter's file say another number than it did."""
    with open(folder / "adapter_model.safetensors", "r+b") as file:
        begin = file.read(1024).index(b'"number":"') + len(b'"number":"')
        file.seek(begin)
        file.write(b"%0*d" % (_DIGITS, number))


def write_pair(root: Path, shape: Shape, rank: int) -> list[Path]:
    """Two adapters of one rank, to swap between."""
    return [write_adapter(root / f"rank{rank}-{n}", shape, rank, 2 * rank + n) for n in range(2)]


def peft_model(
    model: nn.Module, first: Path, device: torch.device, *, padded_to: int | None = None
) -> PeftModel:
    """PEFT's side: one adapter, as it is, or prepared for hotswapping up to a rank."""
    wrapped = PeftModel.from_pretrained(
        model, str(first), autocast_adapter_dtype=False, torch_device=str(device)
    )
    if padded_to is not None:
        prepare_model_for_compiled_hotswap(
            wrapped, target_rank=padded_to, config=wrapped.peft_config
        )
    return wrapped.eval()


def check_equal(models: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> None:
    """All outputs are the first one's, but for the rounding of their dtype.

    Raises:
        AssertionError: They differ.
    """
    with torch.no_grad():
        first, *others = (model(x).float().clone() for model in models)
    for other in others:
        error = ((other - first).norm() / first.norm()).item()
        if not error < (1e-3 if x.dtype == torch.float32 else 0.03):
            raise AssertionError(f"outputs differ by {error:.4f} of their norm")
