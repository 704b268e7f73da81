"""Replicas of a compiled model in a Ray cluster: each client is answered as by PEFT, alone."""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Before anything imports Ray, which reads it then. The token is that of the fixture below.
os.environ["RAY_AUTH_MODE"] = "token"

import lora_server
import psutil
import pytest
import ray
import serve_ray
from lora_server import SLOTS, WINDOW, Adapter, Completion, LoraServer, Prompt, ReplicaReport
from ray import serve
from ray.serve.handle import DeploymentHandle
from served import P, served
from toys import WEIGHTS

from lora_slots import ArgumentError, RecompileError

pytestmark = pytest.mark.slow

EXAMPLES = str(Path(lora_server.__file__).parent)
REPLICAS = 2
ADAPTERS = REPLICAS * SLOTS + 4


@dataclass(frozen=True)
class Cluster:
    handle: DeploymentHandle
    port: int
    folder: Path
    oracle: serve_ray.Oracle

    @property
    def names(self) -> list[str]:
        return self.oracle.names

    def ask(self, prompt: Prompt) -> Completion:
        return serve_ray.ask(prompt, self.port)

    def reports(self) -> list[ReplicaReport]:
        return self.handle.broadcast("report").results()

    def assert_right(self, prompt: Prompt, answer: Completion) -> None:
        assert len(answer.tokens) == prompt.new_tokens
        assert self.oracle.difference(prompt, answer) < 1e-4, prompt

    def ask_at_once(self, prompts: list[Prompt], clients: int) -> list[Completion]:
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(self.ask, prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            self.assert_right(prompt, answer)
        return answers


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    serve_ray.write_adapters(folder, ADAPTERS)
    return folder


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[None]:
    """Ray writes a token into the home folder and logs into /tmp, unless it is told otherwise."""
    # Not a folder of pytest's: the path of a socket in there may have 107 characters.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_TMPDIR", folder)
        yield


@dataclass(frozen=True)
class Demonstration:
    """The command of the documentation, which has answered its own requests and stays."""

    process: subprocess.Popen[str]
    port: int
    printed: str

    @property
    def address(self) -> str:
        return re.search(r"Ray cluster at (\S+)", self.printed)[1]


@pytest.fixture(scope="module")
def demonstration(adapters: Path, ray_environment: None) -> Iterator[Demonstration]:
    port = free_port()
    command = [sys.executable, f"{EXAMPLES}/serve_ray.py", f"--replicas={REPLICAS}"]
    command += ["--backend=eager", f"--adapters={adapters}", "--requests=8", f"--port={port}"]
    process = subprocess.Popen(
        [*command, "--stay"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed = ""
        for line in process.stdout:
            printed += line
            if "ctrl-C stops the server" in line:
                break
        yield Demonstration(process, port, printed)
    finally:
        if process.poll() is None:  # a kill would leave some of Ray's processes
            os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster(adapters: Path, demonstration: Demonstration) -> Iterator[Cluster]:
    oracle = serve_ray.Oracle(lora_server.load_model("tiny"), adapters)
    ray.init(demonstration.address, log_to_driver=False, logging_level="ERROR")
    handle = serve.get_app_handle("default")
    yield Cluster(handle, demonstration.port, adapters, oracle)
    ray.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def prompts(names: list[str | None], count: int, seed: int = 0) -> list[Prompt]:
    dice = random.Random(seed)
    return [
        Prompt(
            adapter=names[number % len(names)],
            tokens=dice.choices(range(256), k=dice.randint(1, 30)),
            new_tokens=dice.randint(1, 6),
        )
        for number in range(count)
    ]


def test_every_answer_is_pefts_whichever_rows_share_its_forward(cluster):
    names = [*cluster.names, None]
    before = cluster.reports()
    answers = cluster.ask_at_once(prompts(names, 5 * len(names)), clients=16)
    reports = cluster.reports()
    assert {answer.replica for answer in answers} == {report.replica for report in reports}
    assert len(reports) == REPLICAS
    rows = sum(report.rows for report in reports) - sum(report.rows for report in before)
    assert rows == sum(len(answer.tokens) for answer in answers)
    for report in reports:
        assert report.recompiles == 0
        assert report.loads > SLOTS >= len(report.loaded_adapters)
        assert report.rows > report.forwards >= report.mixed > 0


def test_adapters_answer_differently(cluster):
    """Otherwise the comparison above would show nothing."""
    same = [
        Prompt(adapter=name, tokens=[5, 17, 99], new_tokens=1) for name in [*cluster.names, None]
    ]
    answers = cluster.ask_at_once(same, clients=2)
    assert len({round(answer.logprobs[0], 3) for answer in answers}) == len(same)


def test_a_replica_that_has_the_adapter_is_preferred(cluster):
    shutil.copytree(cluster.folder / cluster.names[0], cluster.folder / "new")
    first = cluster.ask(Prompt(adapter="new", tokens=[1]))
    time.sleep(1)  # replicas tell every 0.1 s what they have
    later = [cluster.ask(Prompt(adapter="new", tokens=[token])) for token in range(8)]
    assert {answer.replica for answer in later} == {first.replica}


BAD = {
    "unknown": (Prompt(adapter="nobody", tokens=[1]), "404: .*no adapter of that name"),
    "a path": (Prompt(adapter="../adapters", tokens=[1]), "404: .*no adapter of that name"),
    "damaged": (Prompt(adapter="damaged", tokens=[1]), "500: .*damaged"),
    "token": (Prompt(tokens=[256]), "422: tokens must be below 256"),
    "too long": (Prompt(tokens=[1] * WINDOW, new_tokens=2), "422: .*at most 1"),
}


def test_what_is_wrong_with_a_request_is_an_error_for_its_client_alone(cluster):
    damaged = cluster.folder / "damaged"
    damaged.mkdir()
    config = (cluster.folder / cluster.names[0] / "adapter_config.json").read_bytes()
    (damaged / "adapter_config.json").write_bytes(config)
    (damaged / WEIGHTS).write_bytes(b"not a safetensors file")
    good = prompts(cluster.names[:6], 24, seed=1)

    def refused(prompt: Prompt) -> str:
        with pytest.raises(RuntimeError) as raised:
            cluster.ask(prompt)
        return str(raised.value)

    with ThreadPoolExecutor(len(BAD)) as pool:
        errors = [pool.submit(refused, prompt) for prompt, _ in BAD.values()]
        cluster.ask_at_once(good, clients=8)
    for error, (_, message) in zip(errors, BAD.values(), strict=True):
        assert re.match(message, error.result())


def test_a_request_that_serve_routes_by_another_name_is_refused(cluster):
    """As it would be if a client, or a proxy, left the header out."""
    handle = cluster.handle.options(multiplexed_model_id=cluster.names[0])
    with pytest.raises(ArgumentError, match="adapter must be the model id"):
        handle.complete.remote(Prompt(tokens=[1])).result()
    with pytest.raises(ArgumentError, match="adapter must be the model id"):
        cluster.handle.complete.remote(Prompt(adapter=cluster.names[0], tokens=[1])).result()


def test_clients_that_leave_disturb_nobody_and_keep_no_adapter_in_its_slot(cluster):
    """In the midst of loading, of waiting for a slot or in a batch, and of a forward."""
    dice = random.Random(0)
    staying = prompts(cluster.names, 3 * len(cluster.names), seed=2)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(cluster.ask_at_once, staying, clients=6)
        while not answered.done():
            leaving = []
            for name in dice.sample(cluster.names, 4):
                handle = cluster.handle.options(multiplexed_model_id=name)
                prompt = Prompt(adapter=name, tokens=[1], new_tokens=WINDOW)
                leaving.append(handle.complete.remote(prompt))
            time.sleep(dice.uniform(0, 0.1))
            for response in leaving:
                response.cancel()
        answered.result()
    cluster.ask_at_once(prompts(cluster.names, len(cluster.names), seed=3), clients=2)
    for report in cluster.reports():
        assert report.recompiles == 0
        assert len(report.loaded_adapters) <= SLOTS


def test_an_adapter_in_use_stays_in_its_slot_until_the_last_request_is_answered():
    _, manager = served(num_slots=1)
    manager.load(P, "a", activate=False)
    adapter = Adapter(manager, "a")
    assert adapter.acquire()
    eviction = threading.Thread(target=adapter.__del__)
    eviction.start()
    assert adapter.acquire()  # a request that has it goes on to its next token
    for _ in range(2):
        eviction.join(0.05)
        assert eviction.is_alive()
        assert manager.loaded_adapters == ("a",)
        adapter.release()
    eviction.join()
    assert manager.loaded_adapters == ()
    assert not adapter.acquire()
    manager.load(P, "a", activate=False)
    adapter.__del__()  # as Python does at the end, when another may have the name
    assert manager.loaded_adapters == ("a",)


def test_a_forward_of_another_shape_is_refused(adapters, monkeypatch):
    """No batch of rows recompiles; the twin that would is an error."""
    server = LoraServer.func_or_class(str(adapters), backend="eager")
    rows = [(None, [3, 1, 2])]
    expected = server.forward(rows)
    assert server.forward([(None, [7]), *rows])[1:] == expected
    monkeypatch.setattr(lora_server, "ROWS", lora_server.ROWS - 1)
    with pytest.raises(RecompileError):
        server.forward(rows)


def test_ctrl_c_stops_all_processes(demonstration):
    """The last test, since it stops the cluster of the others."""
    ray.shutdown()  # of this process; a driver does not outlive its cluster
    assert "largest difference" in demonstration.printed
    started = psutil.Process(demonstration.process.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in started)
    os.killpg(demonstration.process.pid, signal.SIGINT)  # as a terminal does
    rest, _ = demonstration.process.communicate(timeout=60)
    assert "stopped" in rest
    assert demonstration.process.returncode == 0
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
