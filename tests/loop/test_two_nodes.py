"""A run on two Ray nodes, as on two machines, and engines that a run starts itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.trainer.processes import free_port
from spangrad.trainer.up import Stack, UpConfig
from tests.loop.conftest import end
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
WHO_RAN_WHERE = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
actors = ray._private.state.actors().values()
places = [(one["ActorClassName"], nodes[one["Address"]["NodeID"]]) for one in actors]
print(json.dumps([(name, "learner" if "learner" in has else "rollouts") for name, has in places]))
"""


@dataclass
class Ground:
    """A hub and a gateway without an engine, and a folder for runs."""

    stack: Stack
    store: Store
    folder: Path
    model: Path
    environment: dict[str, str]

    def start(self, run_id: str, more: str, *, updates: int) -> "subprocess.Popen[str]":
        """`spangrad train` with these sections."""
        file = self.folder / f"{run_id}.toml"
        file.write_text(
            textwrap.dedent(f"""
            [run]
            id = "{run_id}"
            folder = "runs"
            updates = {updates}
            [hub]
            url = "{self.stack.hub_url}"
            keys = "{self.stack.keys_file}"
            [serving]
            gateway_url = "{self.stack.gateway_url}"
            model = "{self.model}"
            [agent]
            function = "{HERE}/counting_agent.py:run"
            tasks = "{HERE}/counting_agent.py:tasks"
            reward = "{HERE}/counting_agent.py:reward"
            concurrency = 4
            workers = 2
            max_attempts = 6
            [rollout]
            groups_per_update = 2
            group_size = 4
            [learner]
            lr = 1e-3
            threads = 1
            """)
            + textwrap.dedent(more)
        )
        return subprocess.Popen(
            [sys.executable, "-m", "spangrad", "train", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def engines(self) -> list[int]:
        """Process ids of vLLM servers of this ground's model."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.model).encode() in words and b"vllm.entrypoints.openai.api_server" in words:
                found.append(int(entry.parent.name))
        return found


@pytest.fixture
def ground(served_model: Path, tmp_path: Path) -> Iterator[Ground]:
    # Of its own: its engines are told from others by it.
    model = Path(shutil.copytree(served_model, tmp_path / "model"))
    config = UpConfig(
        model=None,
        folder=str(tmp_path),
        store=str(tmp_path / "store.duckdb"),
        hub_port=free_port(),
        gateway_port=free_port(),
        engine_port=free_port(),
    )
    with Stack(config) as stack:
        stack.start_hub()
        stack.start_gateway()
        with open_store(stack.hub_url, stack.keys.trainer) as store:
            yield Ground(stack, store, tmp_path, model, dict(os.environ))


@contextmanager
def ray_nodes(folder: Path, *nodes: dict[str, int]) -> Iterator[tuple[str, dict[str, str]]]:
    """`ray start` for each, the first one as the head; gives its address and the environment of who joins."""
    address = f"127.0.0.1:{free_port()}"
    # Sockets lie below this folder, and their paths must be short.
    environment = {**os.environ, "RAY_TMPDIR": f"/tmp/sg{os.getpid()}", "RAY_AUTH_MODE": "token"}
    environment |= {"RAY_AUTH_TOKEN": "t" * 32}
    with ExitStack() as started, (folder / "ray.log").open("ab") as log:
        short = Path(environment["RAY_TMPDIR"])
        short.mkdir()
        started.callback(shutil.rmtree, short, ignore_errors=True)
        # Of what `ray start` starts, one is started by a shell that takes a path with a space apart.
        (short / "env").symlink_to(sys.prefix)
        for index, resources in enumerate(nodes):
            where = ["--address", address]
            if not index:
                where = ["--head", "--include-dashboard=false", "--port", address.rpartition(":")[2]]
            node = subprocess.Popen(
                [
                    *(str(short / "env/bin/python"), "-m", "ray.scripts.scripts", "start", "--block", *where),
                    *("--node-ip-address", "127.0.0.1", "--disable-usage-stats", "--num-cpus", "4"),
                    *("--object-store-memory", "100000000", "--resources", json.dumps(resources)),
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started.callback(end_node, node)
            count = index + 1
            text = folder / "ray.log"
            wait_until(lambda: text.read_text().count("Ray runtime started") == count or node.poll(), 60)  # noqa: B023
            assert node.poll() is None, text.read_text()
        yield address, environment


def end_node(node: "subprocess.Popen[bytes]") -> None:
    node.send_signal(signal.SIGTERM)
    try:
        node.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)


def test_a_run_on_two_nodes_has_each_part_on_the_node_that_it_was_given(ground, tmp_path):
    with ray_nodes(tmp_path, {"learner": 1}, {"rollouts": 3}) as (address, environment):
        ground.environment = environment
        training = ground.start(
            "two",
            f"""
            [cluster]
            address = "{address}"
            learner = {{ resources = {{ learner = 1 }} }}
            workers = {{ cpus = 0.5, resources = {{ rollouts = 1 }} }}
            engines = {{ resources = {{ rollouts = 1 }} }}
            """,
            updates=2,
        )
        code, out, err = end(training, 500)
        assert code == 0, err
        assert "2 updates, policy version 2" in out
        told = subprocess.run(
            [sys.executable, "-c", WHO_RAN_WHERE, address], env=environment, capture_output=True, text=True
        )
        assert told.returncode == 0, told.stderr
        where = {tuple(one) for one in json.loads(told.stdout.splitlines()[-1])}
        assert where == {("Learner", "learner"), ("RolloutWorker", "rollouts"), ("EngineActor", "rollouts")}
        wait_until(lambda: not ground.engines())
    for update in ground.store.updates("two"):
        assert update.metrics["gap/published_mean"] < 0.02
        assert update.metrics["gap/published_moved"] > 0


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_engine_of_the_runs_own_comes_back_with_its_weights_and_ends_with_it_however_that_ends(ground):
    training = ground.start("own", "[cluster.engines]", updates=1000)

    def has_made(updates: int) -> bool:
        return training.poll() is not None or len(ground.store.updates("own")) >= updates

    try:
        wait_until(lambda: has_made(1), 500)
        assert training.poll() is None, end(training)
        (server,) = ground.engines()
        os.kill(parent(server), signal.SIGKILL)  # the actor; the server goes with it
        wait_until(lambda: server not in ground.engines())
        before = len(ground.store.updates("own"))
        wait_until(lambda: has_made(before + 2), 500)  # what had been sampled before is used up by then
        assert training.poll() is None, end(training)
        (server,) = ground.engines()
        os.kill(server, signal.SIGKILL)  # the server; its actor starts another one
        before = len(ground.store.updates("own"))
        wait_until(lambda: has_made(before + 2), 500)
        assert training.poll() is None, end(training)
        assert len(ground.engines()) == 1
    finally:
        training.send_signal(signal.SIGKILL)
    _, err = training.communicate()
    assert err.count("starting it again") == 2 and err.count("is back\n") == 2, err
    wait_until(lambda: not ground.engines())
    for update in ground.store.updates("own"):
        assert {sample.staleness for sample in update.samples} <= {0, 1}
        if "gap/published_mean" in update.metrics:  # the last one may not have been published
            assert update.metrics["gap/published_mean"] < 0.02
