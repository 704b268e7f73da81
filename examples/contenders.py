"""What `bench.py` measures with: models of linears, adapters for them, and interleaved timing."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import peft
import psutil
import torch
from peft import LoraConfig, PeftModel
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import lora_slots

# On a GPU everything here runs on it, and is timed by its own events.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = "lora_slots"


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


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, weights: Weights) -> None:
        """One block for each entry of ``weights``."""
        super().__init__()
        self.layers = nn.ModuleList(Block(each) for each in weights)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        for layer in self.layers:
            x = layer(x)
        return x


def base_weights(shape: Shape) -> Weights:
    """Random weights of the size that keeps activations near 1."""
    torch.manual_seed(0)

    def weight(inputs: int, outputs: int) -> nn.Parameter:
        values = torch.randn(outputs, inputs, dtype=shape.dtype, device=DEVICE)
        return nn.Parameter(values * 0.5 * inputs**-0.5, requires_grad=False)

    return [{name: weight(*s) for name, s in shape.linears.items()} for _ in range(shape.layers)]


def write_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> Path:
    """A PEFT folder with all seven linears of every layer at ``rank``."""
    generator = torch.Generator().manual_seed(seed)

    def random_(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * 0.01).to(shape.dtype)

    tensors = {
        f"base_model.model.layers.{layer}.{name}.lora_{side}.weight": tensor
        for layer in range(shape.layers)
        for name, (inputs, outputs) in shape.linears.items()
        for side, tensor in (("A", random_(rank, inputs)), ("B", random_(outputs, rank)))
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(shape.linears))
    config.save_pretrained(str(folder))
    return folder


def peft_model(model: nn.Module, first: Path, *, padded_to: int | None) -> PeftModel:
    """PEFT's side: one adapter, prepared for hotswapping up to a rank, or as it is."""
    wrapped = PeftModel.from_pretrained(
        model, str(first), autocast_adapter_dtype=False, torch_device=DEVICE.type
    )
    if padded_to is not None:
        prepare_model_for_compiled_hotswap(
            wrapped, target_rank=padded_to, config=wrapped.peft_config
        )
    return wrapped.eval()


@dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
        what: What every contender did.
        times: Of each contender, the median and the first and third quartile, in milliseconds.
    """

    what: str
    times: Mapping[str, tuple[float, float, float]]

    def ratio(self, name: str) -> float:
        """How many times as long as lora_slots a contender took."""
        return self.times[name][0] / self.times[OURS][0]


def interleaved(what: str, runs: Mapping[str, Callable[[], object]], rounds: int) -> Figure:
    """Time all in turn, ``rounds`` times, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            elapsed = milliseconds(run)
            if round_ > 1:
                times[name].append(elapsed)
    return Figure(what, {name: spread(each) for name, each in times.items()})


def milliseconds(run: Callable[[], object]) -> float:
    """How long ``run`` takes; on a GPU, until that has done what it was asked for."""
    if DEVICE.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def spread(times: list[float]) -> tuple[float, float, float]:
    """The median, and the first and the third quartile."""
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


def check_equal(models: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> None:
    """All outputs are the first one's, but for the rounding of their dtype."""
    with torch.no_grad():
        first, *others = (model(x).float().clone() for model in models)
    for other in others:
        error = ((other - first).norm() / first.norm()).item()
        if not error < (0.03 if x.dtype == torch.bfloat16 else 1e-3):
            raise AssertionError(f"outputs differ by {error:.4f} of their norm")


def environment() -> dict[str, str | int]:
    """What a figure was measured on."""
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count() or 0,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "peft": peft.__version__,
        "lora_slots": lora_slots.__version__,
        "threads": torch.get_num_threads(),
    }


def processor_name() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
