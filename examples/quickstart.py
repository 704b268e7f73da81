"""Swap four LoRA adapters in a compiled SmolLM2, then let PEFT try the same.

    python examples/quickstart.py

The whole model is compiled twice, for the prompt and for one more token. After that, adapters of
four ranks, three sets of layers and two scaling rules come and go, and nothing is compiled again.
Every output is compared with PEFT's for the same files.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from smollm2 import encode_chat, load_smollm2
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from lora_slots import LoadReport, SlotManager

ADAPTERS = Path(__file__).resolve().parent / "adapters"
NAMES = ("pirate", "bard", "json", "robot")
MIX = {"bard": 0.5, "pirate": 0.5}
PROMPT = "What is the sea?"
NEW_TOKENS = 24
MAX_RANK = 32
console = Console(width=max(Console().width, 120))  # the answers need room


@dataclass(frozen=True)
class Row:
    """What one swap did."""

    name: str
    rank: str
    scaling: str
    modules: str
    swap_ms: float
    graphs: int
    difference: float
    sentence: str


class Chat:
    """Greedy answers from a compiled model with a cache of fixed size."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compile ``model`` as a whole; graphs are made on first use."""
        self.model, self.tokenizer = model, tokenizer
        self.compiled = torch.compile(model, fullgraph=True, dynamic=False)
        self.prompt = encode_chat(tokenizer, PROMPT)
        self.cache = StaticCache(
            config=model.config, max_cache_len=self.prompt.shape[1] + NEW_TOKENS
        )

    @torch.no_grad()
    def logits(self, tokens: Tensor, start: int) -> Tensor:
        """One compiled forward: ``[1, tokens, vocabulary]`` for tokens at ``start`` and on."""
        positions = torch.arange(start, start + tokens.shape[1])[None]
        output = self.compiled(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        return output.logits

    def answer(self) -> tuple[str, Tensor]:
        """The greedy answer to `PROMPT`, and the prompt's logits.

        The cache starts empty: what an earlier adapter left in it would be wrong for this one.
        """
        self.cache.reset()
        first = self.logits(self.prompt, 0)
        tokens = [first[:, -1:].argmax(-1)]
        while len(tokens) < NEW_TOKENS and tokens[-1].item() != self.tokenizer.eos_token_id:
            start = self.prompt.shape[1] + len(tokens) - 1
            tokens.append(self.logits(tokens[-1], start).argmax(-1))
        text = self.tokenizer.decode(torch.cat(tokens, 1)[0], skip_special_tokens=True)
        return " ".join(text.split()), first


class Oracle:
    """PEFT, eager, on a copy of the base model."""

    def __init__(self, base: PreTrainedModel, prompt: Tensor) -> None:
        """Keep a copy of ``base`` as it came."""
        self.base, self.prompt = copy.deepcopy(base), prompt

    @torch.no_grad()
    def logits(self, weights: dict[str, float]) -> Tensor:
        """The prompt's logits with these adapters active at these weights."""
        if not weights:
            return self.base(self.prompt).logits
        first, *others = weights
        model = PeftModel.from_pretrained(self.base, str(ADAPTERS / first), adapter_name=first)
        for name in others:
            model.load_adapter(str(ADAPTERS / name), adapter_name=name)
        model.base_model.set_adapter(list(weights))
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                for name, weight in weights.items():
                    if name in layer.scaling:
                        layer.scaling[name] *= weight
        logits = model.eval()(self.prompt).logits
        self.base = model.unload()
        return logits


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show that something is under way, and for how long."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        progress.add_task(what, total=None)
        yield


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def swap_with_slots(
    manager: SlotManager, chat: Chat, oracle: Oracle
) -> tuple[list[Row], dict[str, Tensor]]:
    """Load every adapter, then mix two, then unload; compare each output with PEFT's."""
    right = {name: oracle.logits({name: 1.0}) for name in NAMES}
    _, base_logits = chat.answer()
    rows = []

    def record(name: str, report: LoadReport | None, change: Callable[[], object],
               expected: Tensor) -> None:  # fmt: skip
        before, started = graph_count(), time.perf_counter()
        outcome = change()
        elapsed = (time.perf_counter() - started) * 1e3
        report = outcome if isinstance(outcome, LoadReport) else report
        with manager.no_recompile():
            sentence, logits = chat.answer()
        difference = (logits - expected).abs().max().item()
        rows.append(
            Row(name, *describe(report), elapsed, graph_count() - before, difference, sentence)
        )

    record("(none)", None, lambda: None, oracle.logits({}))
    for name in NAMES:
        record(name, None, lambda name=name: manager.load(ADAPTERS / name), right[name])

    def mix() -> None:
        manager.unload("default")
        for name in MIX:
            manager.load(ADAPTERS / name, name)
        manager.set_adapters(list(MIX), list(MIX.values()))

    label = " + ".join(f"{weight:g} {name}" for name, weight in MIX.items())
    record(label, None, mix, oracle.logits(MIX))
    record("(unloaded)", None, lambda: [manager.unload(name) for name in MIX], base_logits)
    return rows, right


def describe(report: LoadReport | None) -> tuple[str, str, str]:
    """Rank, range of scalings, and number of modules, for the table."""
    if report is None:
        return "", "", ""
    low, high = min(report.scaling.values()), max(report.scaling.values())
    scaling = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return str(report.rank), scaling, str(len(report.modules))


def swap_with_peft(base: nn.Module, prompt: Tensor, right: dict[str, Tensor]) -> list[list[str]]:
    """The same swaps by `hotswap_adapter`, after preparing the model as PEFT asks for."""
    model = PeftModel.from_pretrained(base, str(ADAPTERS / NAMES[0])).eval()
    prepare_model_for_compiled_hotswap(model, target_rank=MAX_RANK, config=model.peft_config)
    rows = []
    for name in (*NAMES, NAMES[0]):
        started = time.perf_counter()
        try:
            hotswap_adapter(model, str(ADAPTERS / name), "default", torch_device="cpu")
        except (ValueError, RuntimeError) as error:
            rows.append([name, "", "refused", str(error)])
            continue
        elapsed = (time.perf_counter() - started) * 1e3
        with torch.no_grad():
            difference = (model(prompt).logits - right[name]).abs().max().item()
        verdict = "as PEFT itself without hotswap" if difference < 1e-3 else "WRONG OUTPUT"
        rows.append([name, f"{elapsed:.1f}", f"{difference:.1e}", verdict])
    return rows


def show_slots(rows: list[Row]) -> None:
    """The main table."""
    table = Table(title=f"lora_slots: {PROMPT!r} answered by one compiled model", show_lines=True)
    for column in ("adapter", "rank", "scaling", "modules", "swap\nms", "recom-\npiles"):
        table.add_column(column, justify="left" if column == "adapter" else "right")
    table.add_column("largest logit\ndifference\nto PEFT", justify="right")
    table.add_column("answer", min_width=40)
    for row in rows:
        table.add_row(
            row.name, row.rank, row.scaling, row.modules, f"{row.swap_ms:.1f}", str(row.graphs),
            f"{row.difference:.1e}", row.sentence,
        )  # fmt: skip
    console.print(table)


def show_peft(rows: list[list[str]]) -> None:
    """The table for PEFT's own hotswap."""
    table = Table(title="PEFT hotswap_adapter: the same swaps, eager", show_lines=True)
    for column in ("adapter", "swap ms", "largest logit\ndifference to PEFT", "what it said"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> tuple[list[Row], list[list[str]]]:
    """Run the demonstration, and return what both tables show."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    model, tokenizer = load_smollm2()
    prompt = encode_chat(tokenizer, PROMPT)
    oracle = Oracle(model, prompt)
    manager = SlotManager(model, max_rank=MAX_RANK, num_slots=2)
    console.print(f"attached {manager}")
    chat = Chat(model, tokenizer)
    with doing("compiling the prompt graph and the one-token graph (a minute or more)"):
        chat.answer()
    console.print(f"{graph_count()} graphs compiled; from here on none may be")
    with doing("swapping adapters, and asking PEFT for the right answers"):
        rows, right = swap_with_slots(manager, chat, oracle)
    show_slots(rows)
    with doing("the same swaps by PEFT's hotswap_adapter"):
        peft_rows = swap_with_peft(oracle.base, prompt, right)
    show_peft(peft_rows)
    return rows, peft_rows


if __name__ == "__main__":
    main()
