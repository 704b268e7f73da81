"""Serve many adapters from two replicas of a compiled model, with Ray Serve, on this machine.

    python examples/serve_ray.py
    python examples/serve_ray.py --model smollm2 --adapters examples/adapters --requests 16 \
        --replicas 1
    python examples/serve_ray.py --stay

A local Ray cluster is started, and stopped at the end or with ctrl-C. Clients send requests over
HTTP, each for an adapter or for the base model; there are more adapters than slots. Every answer is
compared with PEFT's for the same files.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported

import ray
import requests
import torch
from lora_server import MODEL_ID, SLOTS, WINDOW, Completion, Options, Prompt, ReplicaReport, build
from peft import LoraConfig, PeftModel, get_peft_model
from ray import serve
from ray.serve.handle import DeploymentHandle
from rich.console import Console
from rich.progress import track
from rich.table import Table
from served_model import load_model
from transformers import PreTrainedModel

console = Console()
logging.getLogger("ray.serve").setLevel(logging.ERROR)


@contextmanager
def serving(options: Options, port: int = 8000) -> Iterator[DeploymentHandle]:
    """Start a Ray cluster of this machine alone, and the server in it; stop both at the end.

    Yields:
        A handle of the server, which listens at ``port``, too.
    """
    ray.init(
        "local", num_cpus=options.replicas, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        yield serve.run(build(options))
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(prompt: Prompt, port: int = 8000) -> Completion:
    """Send one request, and wait for the answer.

    Raises:
        RuntimeError: The server refused it.
    """
    response = requests.post(
        f"http://127.0.0.1:{port}", data=prompt.model_dump_json(), timeout=600,
        headers={MODEL_ID: prompt.adapter or ""},
    )  # fmt: skip
    if not response.ok:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    return Completion.model_validate_json(response.content)


class Oracle:
    """PEFT, eager, one request at a time."""

    def __init__(self, model: PreTrainedModel, adapters: Path) -> None:
        """Load every adapter of a folder into ``model``."""
        paths = sorted(path for path in adapters.iterdir() if path.is_dir())
        self.names = [path.name for path in paths]
        self.model = PeftModel.from_pretrained(model, paths[0], adapter_name=paths[0].name)
        for path in paths[1:]:
            self.model.load_adapter(path, adapter_name=path.name)
        self.model.eval()

    @torch.no_grad()
    def difference(self, prompt: Prompt, answer: Completion) -> float:
        """The largest difference of a log-probability; infinite if the tokens are others."""
        tokens = torch.tensor([[*prompt.tokens, *answer.tokens]])
        if prompt.adapter is None:
            with self.model.disable_adapter():
                logits = self.model(tokens[:, :-1]).logits
        else:
            self.model.set_adapter(prompt.adapter)
            logits = self.model(tokens[:, :-1]).logits
        logprobs, best = logits[0, len(prompt.tokens) - 1 :].log_softmax(-1).max(-1)
        if best.tolist() != answer.tokens:
            return float("inf")
        return (logprobs - torch.tensor(answer.logprobs)).abs().max().item()


def write_adapters(folder: Path, count: int = 12) -> None:
    """Let PEFT write random adapters of several ranks and layers for the tiny model."""
    for number in range(count):
        targets = [["q_proj", "v_proj"], "all-linear"][number % 2]
        config = LoraConfig(
            r=2 ** (number % 4 + 1), target_modules=targets, init_lora_weights=False
        )
        model = load_model("tiny")
        torch.manual_seed(number + 1)
        get_peft_model(model, config).save_pretrained(folder / f"adapter-{number}")


def prompts(names: Sequence[str], count: int, vocabulary: int) -> list[Prompt]:
    """Random prompts, one in eight for the base model; of adapters, the first are liked best."""
    dice = random.Random(0)
    popularity = [1 / rank for rank in range(1, len(names) + 1)]
    return [
        Prompt(
            adapter=None if dice.random() < 1 / 8 else dice.choices(names, popularity)[0],
            tokens=dice.choices(range(vocabulary), k=dice.randint(4, WINDOW // 2)),
            new_tokens=8,
        )
        for _ in range(count)
    ]


def show(reports: Sequence[ReplicaReport], answers: Sequence[Completion], seconds: float) -> None:
    """One line for each replica."""
    table = Table(title=f"{len(answers)} requests in {seconds:.1f} s, {len(reports)} replicas")
    for column in ("replica", "re-\nquests", "tokens\nper s", "for-\nwards", "rows per\nforward",
                   "of several\nadapters", "loads", "recom-\npiles"):  # fmt: skip
        table.add_column(column, justify="left" if column == "replica" else "right")
    for report in reports:
        own = [answer for answer in answers if answer.replica == report.replica]
        tokens = sum(len(answer.tokens) for answer in own)
        table.add_row(
            report.replica, f"{len(own)}", f"{tokens / seconds:.0f}", f"{report.forwards}",
            f"{report.rows / max(report.forwards, 1):.1f}", f"{report.mixed}", f"{report.loads}",
            f"{report.recompiles}",
        )  # fmt: skip
    console.print(table)


def main(
    options: Options,
    *,
    clients: int = 16,
    requests_: int = 128,
    port: int = 8000,
    stay: bool = False,
) -> tuple[list[ReplicaReport], float]:
    """Run the demonstration.

    Returns:
        What the replicas report, and the largest difference of an answer to PEFT's.
    """
    oracle = Oracle(load_model(options.model), Path(options.adapters))
    vocabulary = oracle.model.config.vocab_size
    asked = prompts(oracle.names, requests_, vocabulary)
    with ExitStack() as stack:
        with console.status("starting Ray, and compiling the model in every replica"):
            handle = stack.enter_context(serving(options, port))
        console.print(
            f"{options.replicas} replicas with {SLOTS} slots each are ready for "
            f"{len(oracle.names)} adapters at http://127.0.0.1:{port}"
        )
        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            sent = pool.map(lambda prompt: ask(prompt, port), asked)
            what = f"{clients} clients"
            answers = list(track(sent, what, total=len(asked), console=console))
        seconds = time.perf_counter() - started
        reports = handle.broadcast("report").results()
        show(reports, answers, seconds)
        pairs = zip(asked, answers, strict=True)
        difference = max(oracle.difference(prompt, answer) for prompt, answer in pairs)
        console.print(f"largest difference of a log-probability to PEFT's: {difference:.1e}")
        if stay:
            with suppress(KeyboardInterrupt):
                address = ray.get_runtime_context().gcs_address
                console.print(f"ctrl-C stops the server, in the Ray cluster at {address}")
                threading.Event().wait()
    console.print("stopped")
    return reports, difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a folder or hub id")
    parser.add_argument(
        "--adapters", type=Path, help="their folder; for the tiny model: random ones"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="a backend of torch.compile")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--stay", action="store_true", help="keep serving until ctrl-C")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.adapters is None:
            write_adapters(Path(scratch))
        main(
            Options(
                adapters=str((args.adapters or Path(scratch)).resolve()),
                model=args.model, backend=args.backend, replicas=args.replicas,
            ),
            clients=args.clients, requests_=args.requests, port=args.port, stay=args.stay,
        )  # fmt: skip
