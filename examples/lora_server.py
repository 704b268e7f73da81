"""A Ray Serve deployment: each replica has a compiled model whose rows have adapters of their own.

    serve run lora_server:build adapters=/path/to/adapters replicas=2

The model id of a request, which Serve routes by, is the name of a folder in there; without one the
base model answers. See docs/ray.md, and serve_ray.py for a demonstration on one machine.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from ray import serve
from served_model import NextToken, load_model
from starlette.requests import Request
from starlette.responses import Response
from torch._dynamo.utils import counters

from lora_slots import ArgumentError, LoraSlotsError, SlotManager, UnknownAdapterError

SLOTS = 4  # adapters that a replica has room for
MAX_RANK = 32
ROWS = 8  # of every forward
WINDOW = 64  # tokens of every row
MODEL_ID = "serve_multiplexed_model_id"  # the header that Serve reads
Row = tuple[str | None, Sequence[int]]  # an adapter's name, and tokens


class Prompt(BaseModel):
    """What a client sends. Its adapter must be the model id of the request that Serve routes by."""

    adapter: str | None = None  # None: the base model
    tokens: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=WINDOW)]
    new_tokens: PositiveInt = 1


class Completion(BaseModel):
    """What it gets: the likeliest tokens, the log-probability of each, and who found them."""

    tokens: list[int]
    logprobs: list[float]
    replica: str


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica has done since it was ready.

    Attributes:
        replica: Its id.
        forwards: How often the model ran.
        rows: The rows in them that requests had asked for.
        mixed: The forwards with several adapters, or with one and the base model.
        loads: How often an adapter was loaded.
        recompiles: How many graphs were compiled.
        loaded_adapters: Those in slots now.
    """

    replica: str
    forwards: int
    rows: int
    mixed: int
    loads: int
    recompiles: int
    loaded_adapters: tuple[str, ...]


class Adapter:
    """An adapter in its slot, which stays there while requests use it.

    Serve keeps these objects, and calls `__del__` of the one asked for least recently to make room.
    """

    def __init__(self, manager: SlotManager, name: str) -> None:
        """Stand for the adapter ``name``, which is loaded."""
        self.name = name
        self._manager = manager
        self._changed = threading.Condition()
        self._users = 0
        self._gone = False

    def acquire(self) -> bool:
        """Keep it in its slot until `release`, as often as one likes; False if it has left."""
        with self._changed:
            self._users += not self._gone
            return not self._gone

    def release(self) -> None:
        """Let it go."""
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def __del__(self) -> None:
        """Empty the slot once nobody uses it. Serve calls this in a thread, Python once more."""
        with self._changed:
            if self._gone:
                return
            self._changed.wait_for(lambda: self._users == 0)
            self._gone = True
        self._manager.unload(self.name)


@serve.deployment(max_ongoing_requests=4 * ROWS)
class LoraServer:
    """One replica.

    Serve chooses the replica, decides which adapters it shall have, and gathers rows. The manager
    puts adapters into slots and gives every row of a forward its own.
    """

    def __init__(self, adapters: str, model: str = "tiny", backend: str = "inductor") -> None:
        """Load and compile the model; no request comes before that is done.

        Args:
            adapters: The folder of all adapters, the same for every replica.
            model: As for `load_model`.
            backend: The backend of `torch.compile`.
        """
        self.folder = Path(adapters)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base = load_model(model).to(self.device)
        self.vocabulary = base.config.vocab_size
        self.manager = SlotManager(base, max_rank=MAX_RANK, num_slots=SLOTS, routing=True)
        self.model = torch.compile(NextToken(base), backend=backend, fullgraph=True, dynamic=False)
        self.forwards = self.rows = self.mixed = self.loads = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        # All forwards in one thread: graphs are compiled, and watched, for the thread they run in.
        self.thread = ThreadPoolExecutor(1)
        self.thread.submit(self.warm_up).result()

    def warm_up(self) -> None:
        """Compile the one graph, and measure it."""
        self.forward([], allow_first=True)
        started = time.perf_counter()
        self.forward([])
        # So that those who wait for the running forward can join those who came before them.
        self.next_token.set_batch_wait_timeout_s(time.perf_counter() - started)
        self.graphs_at_first = counters["stats"]["unique_graphs"]

    async def __call__(self, request: Request) -> Response:
        """`complete` over HTTP: takes and gives JSON, or the text of an error."""
        try:
            answer = await self.complete(Prompt.model_validate_json(await request.body()))
        except (ValidationError, LoraSlotsError) as error:
            kinds = {UnknownAdapterError: 404, ArgumentError: 422, ValidationError: 422}
            return Response(str(error), status_code=kinds.get(type(error), 500))
        return Response(answer.model_dump_json(), media_type="application/json")

    async def complete(self, prompt: Prompt) -> Completion:
        """Continue a prompt with the adapter that the request is for, token by token.

        Raises:
            UnknownAdapterError: There is no such adapter.
            ArgumentError: The tokens are not the model's, or are too many; or Serve was told to
                route by another name.
            LoraSlotsError: The adapter cannot be loaded.
        """
        self.check(prompt)
        tokens, logprobs = list(prompt.tokens), []
        async with self.using(prompt.adapter) as adapter:
            for _ in range(prompt.new_tokens):
                token, logprob = await self.step(adapter, tokens)
                tokens.append(token)
                logprobs.append(logprob)
        replica = serve.get_replica_context().replica_id.unique_id
        return Completion(tokens=tokens[len(prompt.tokens) :], logprobs=logprobs, replica=replica)

    def check(self, prompt: Prompt) -> None:
        """Refuse what would go wrong later, for all rows of a batch, or unnoticed."""
        routed, room = serve.get_multiplexed_model_id() or None, WINDOW + 1 - len(prompt.tokens)
        if prompt.adapter != routed:
            raise ArgumentError(
                f"the prompt's adapter must be the model id that Serve routed by ({MODEL_ID} in "
                f"HTTP), got {prompt.adapter!r} and {routed!r}"
            )
        if max(prompt.tokens) >= self.vocabulary:
            raise ArgumentError(f"tokens must be below {self.vocabulary}, got {max(prompt.tokens)}")
        if prompt.new_tokens > room:
            raise ArgumentError(
                f"new_tokens must be at most {room} after {len(prompt.tokens)} tokens, got "
                f"{prompt.new_tokens}"
            )

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Adapter | None]:
        """Keep an adapter in its slot; load it first if need be."""
        if name is None:
            yield None
            return
        self.path_of(name)  # an error here evicts nothing
        while True:
            adapter = await asyncio.shield(self.start(self.adapter(name)))
            if adapter.acquire():  # else Serve evicted it meanwhile
                break
        try:
            yield adapter
        finally:
            adapter.release()

    def step(self, adapter: Adapter | None, tokens: list[int]) -> asyncio.Future[tuple[int, float]]:
        """Put a row into the next batch. It keeps its adapter by itself, too, until it has run."""
        row = (None if adapter is None else adapter.name, tokens)
        # Serve parts batches by the model id in the context; here rows may differ.
        task = self.start(self.next_token(row), Context())
        if adapter is not None:
            adapter.acquire()
            task.add_done_callback(lambda _: adapter.release())
        return asyncio.shield(task)

    def start(self, work: Coroutine[Any, Any, Any], context: Context | None = None) -> asyncio.Task:
        """Start what goes on when the client leaves: Serve and manager must not lose step."""
        task = asyncio.create_task(work, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def path_of(self, name: str) -> Path:
        """Where an adapter lies. Names come from clients, so that they must not be paths."""
        path = self.folder / name
        if not re.fullmatch(r"\w[\w.-]*", name) or not path.is_dir():
            raise UnknownAdapterError(f"the server has no adapter of that name, got {name!r}")
        return path

    @serve.multiplexed(max_num_models_per_replica=SLOTS)
    async def adapter(self, name: str) -> Adapter:
        """Load an adapter into a free slot, which forwards do not notice."""
        await asyncio.to_thread(self.manager.load, self.path_of(name), name, activate=False)
        self.loads += 1
        return Adapter(self.manager, name)

    @serve.batch(max_batch_size=ROWS)
    async def next_token(self, rows: list[Row]) -> list[tuple[int, float]]:
        """The next token of every row, and its log-probability."""
        self.forwards += 1
        self.rows += len(rows)
        self.mixed += len({name for name, _ in rows}) > 1
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.forward, rows)

    @torch.no_grad()
    def forward(self, rows: list[Row], *, allow_first: bool = False) -> list[tuple[int, float]]:
        """One forward, always of the same shape: what is missing are rows of the base model."""
        names = [name for name, _ in rows] + [None] * (ROWS - len(rows))
        tokens = torch.zeros(ROWS, WINDOW, dtype=torch.int64)
        last = torch.zeros(ROWS, dtype=torch.int64)
        for number, (_, row) in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
            last[number] = len(row) - 1
        with (
            self.manager.routed(names),
            self.manager.hold(),
            self.manager.no_recompile(allow_first=allow_first),
        ):
            logprobs, best = self.model(tokens.to(self.device), last.to(self.device))
            return list(zip(best.tolist(), logprobs.tolist(), strict=True))[: len(rows)]

    async def report(self) -> ReplicaReport:
        """What this replica has done; ask all with ``handle.broadcast("report")``."""
        return ReplicaReport(
            replica=serve.get_replica_context().replica_id.unique_id,
            forwards=self.forwards,
            rows=self.rows,
            mixed=self.mixed,
            loads=self.loads,
            recompiles=counters["stats"]["unique_graphs"] - self.graphs_at_first,
            loaded_adapters=self.manager.loaded_adapters,
        )


class Options(BaseModel):
    """What `build` is given: the arguments of `LoraServer`, and what each replica gets."""

    adapters: str
    model: str = "tiny"
    backend: str = "inductor"
    replicas: PositiveInt = 1
    gpus: float = 0


def build(options: Options | Mapping[str, str]) -> serve.Application:
    """The application, for `serve.run`; for ``serve run lora_server:build``, from strings."""
    options = Options.model_validate(options)
    server = LoraServer.options(
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": options.gpus},
    )
    return server.bind(options.adapters, options.model, options.backend)
