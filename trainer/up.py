"""Hub, gateway and engine together on one machine: `spangrad up`, and the ground under `spangrad demo`.

Knows which process needs which address and key. Knows nothing of training.

* What can be checked (ports, addresses, keys, model, store) is, before anything is written or started;
  each process logs into `<folder>/logs`.
* Keys are made once and kept in a file that only its owner can read. Gateway and
  agents get the agent's key; nobody but the trainer gets the trainer's.
* `watch` starts again what dies, as often as it takes. A trainer that finds another version than
  its own publishes again.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spangrad.errors import ConfigError, SpangradError
from spangrad.store.file_store import check_file
from spangrad.store.keys import Keys
from spangrad.tracer.gateway.config import GatewayConfig
from spangrad.trainer.processes import Service, require_free_port
from spangrad.trainer.serving.engine import Engine, EngineConfig
from spangrad.trainer.serving.weight_files import check_model_folder

LONGEST_PAUSE_S: Final = 60.0
"""Between two tries to start a part again."""
_BACK: Final = {
    "hub": "is back",
    "engine": "is back; a trainer publishes its version again before the next update",
    "gateway": "is back",
}


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What to start, and where."""

    model: str | None
    """Model folder for the engine; None: hub and gateway only, for an engine that runs elsewhere."""
    folder: str = ".spangrad"
    """Logs and keys."""
    store: str = ".spangrad/store.duckdb"
    """The hub's file."""
    host: str = "127.0.0.1"
    """Address of hub and gateway."""
    hub_port: int = 4318
    gateway_port: int = 8100
    engine_port: int = 8000
    engine_url: str | None = None
    """An engine that runs elsewhere; None: `engine_port` on this machine."""
    served_name: str = "policy"
    max_model_len: int = 1024
    """Longest prompt plus reply, tokens."""
    max_num_seqs: int = 32
    """Requests that the engine works on at the same time."""
    lora_rank: int = 0
    """Largest rank of adapters that can be published to the engine; 0: none can."""
    raw_log: str | None = None
    """File for the engine's raw replies, for audits; None: not kept."""


class Stack:
    """The running processes."""

    def __init__(self, config: UpConfig) -> None:
        """Load the keys, or make them, to be written when `start_hub` or another starts a process."""
        self.config = config
        self.folder = Path(config.folder).resolve()
        self.keys_file = self.folder / "keys.json"
        self.keys = Keys.load(self.keys_file) if self.keys_file.exists() else Keys.generate()
        self.hub: Service | None = None
        self.gateway: Service | None = None
        self.engine: Engine | None = None

    @property
    def hub_url(self) -> str:
        """Address of the hub."""
        return f"http://{self.config.host}:{self.config.hub_port}"

    @property
    def gateway_url(self) -> str:
        """Address that agents call; they add `/v1`."""
        return f"http://{self.config.host}:{self.config.gateway_port}"

    @property
    def engine_url(self) -> str:
        """The engine's own address."""
        return self.config.engine_url or f"http://127.0.0.1:{self.config.engine_port}"

    def check(self) -> None:
        """Raise what starting would raise as far as it can be known, before anything is written.

        Raises:
            ConfigError: A setting of the gateway or of the engine can't be.
            PolicyError: The model folder can't be served.
            PortInUseError: The first address that is taken.
            StoreError: The store's file can't be opened.
        """
        config = self.config
        GatewayConfig(self.engine_url, store=self.hub_url, host=config.host, agent_key=self.keys.agent)
        if config.hub_port == config.gateway_port:
            raise ConfigError(f"hub and gateway have port {config.hub_port}, both; choose two")
        if config.engine_url is None and config.model is not None:
            self._engine_config(config.model)
            check_model_folder(config.model)
            require_free_port("127.0.0.1", config.engine_port, what="engine")
        require_free_port(config.host, config.hub_port, what="hub")
        require_free_port(config.host, config.gateway_port, what="gateway")
        check_file(config.store)

    def start_hub(self) -> None:
        """Start the hub and wait until it answers."""
        self._write_keys()
        self.hub = Service(
            "hub",
            [
                *(sys.executable, "-m", "spangrad", "hub"),
                *("--store", str(Path(self.config.store).resolve())),
                *("--host", self.config.host, "--port", str(self.config.hub_port)),
                *("--keys", str(self.keys_file)),
            ],
            log=self.folder / "logs" / "hub.log",
            ready_url=f"{self.hub_url}/healthz",
        ).start()
        self.hub.wait_ready(60.0)

    def start_gateway(self) -> None:
        """Start the gateway and wait until it answers."""
        self._write_keys()
        raw_log = ("--raw-log", self.config.raw_log) if self.config.raw_log else ()
        self.gateway = Service(
            "gateway",
            [
                *(sys.executable, "-m", "spangrad", "gateway"),
                *("--engine", self.engine_url, "--store", self.hub_url),
                *("--host", self.config.host, "--port", str(self.config.gateway_port)),
                *("--keys", str(self.keys_file)),
                *raw_log,
            ],
            log=self.folder / "logs" / "gateway.log",
            ready_url=f"{self.gateway_url}/spangrad/health",
        ).start()
        self.gateway.wait_ready(60.0)

    def start_engine(self, model: str | None = None) -> None:
        """Start the engine and wait until it serves."""
        folder = model or self.config.model
        assert folder is not None
        self.engine = Engine(self._engine_config(folder))
        self.engine.start()
        self.engine.wait_ready()

    def stop(self) -> None:
        """Stop what was started, agents' side first, the store last."""
        for part in (self.gateway, self.engine, self.hub):
            if part is not None:
                part.stop()
        self.gateway = self.engine = self.hub = None

    def abandon(self, name: str) -> None:
        """End what is left of a part that did not get ready; it counts as dead."""
        part: Service | Engine | None = getattr(self, name)
        if part is not None:
            part.stop()

    def _engine_config(self, model: str) -> EngineConfig:
        return EngineConfig(
            model=model,
            port=self.config.engine_port,
            served_model_name=self.config.served_name,
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            lora_rank=self.config.lora_rank,
            log=str(self.folder / "logs" / "engine.log"),
        )

    def _write_keys(self) -> None:
        if not self.keys_file.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.keys.save(self.keys_file)
            except OSError as error:
                raise ConfigError(
                    f"keys can't be written to {str(self.keys_file)!r}: {error.strerror}; "
                    "name another folder with --folder"
                ) from error

    def __enter__(self) -> "Stack":
        """Nothing is started yet; leaving stops whatever was."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self.stop()


def up(config: UpConfig, *, say: Callable[[str], None] = print) -> None:
    """Start hub, engine and gateway, say where they are, and keep the engine alive until interrupted."""
    with Stack(config) as stack:
        stack.check()
        stack.start_hub()
        say(f"hub      {stack.hub_url}  (store {config.store}, keys {stack.keys_file})")
        if config.engine_url is None and config.model is not None:
            say("engine   starting, about 20 s ...")
            stack.start_engine()
        if config.engine_url is not None or config.model is not None:
            say(f"engine   {stack.engine_url}")
        else:
            say(
                f"engine   none: name a model folder, or start one at {stack.engine_url}"
                " (`spangrad serve MODEL`); until then agents get no answers"
            )
        stack.start_gateway()
        say(f"gateway  {stack.gateway_url}/v1")
        say("         OPENAI_BASE_URL of your agent; OPENAI_API_KEY is the agent's key from the file of keys")
        watch(stack, say=say)


def watch(stack: Stack, *, say: Callable[[str], None], interval_s: float = 1.0) -> None:
    """Start again what dies; what can't be started is tried again, after ever longer pauses.

    Returns on KeyboardInterrupt.
    """
    failures: dict[str, int] = {}
    next_try_s: dict[str, float] = {}
    try:
        while True:
            time.sleep(interval_s)
            for name, part, start in (
                ("hub", stack.hub, stack.start_hub),
                ("engine", stack.engine, stack.start_engine),
                ("gateway", stack.gateway, stack.start_gateway),
            ):
                if part is None or part.is_alive() or time.monotonic() < next_try_s.get(name, 0.0):
                    continue
                if name not in failures:
                    say(f"{name:8} died; starting it again")
                try:
                    start()
                except (SpangradError, OSError) as error:
                    pause_s = min(interval_s * 2.0 ** failures.get(name, 0), LONGEST_PAUSE_S)
                    failures[name] = failures.get(name, 0) + 1
                    next_try_s[name] = time.monotonic() + pause_s
                    stack.abandon(name)
                    say(f"{name:8} can't be started ({error}); trying again in {pause_s:g} s")
                else:
                    failures.pop(name, None)
                    say(f"{name:8} {_BACK[name]}")
    except KeyboardInterrupt:
        say("stopping")
