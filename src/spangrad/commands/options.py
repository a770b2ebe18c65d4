"""What several commands share: options, opening a store, extras, ending on SIGTERM.

Importing this module loads nothing heavy; the functions do, when a command calls them.
"""

import logging
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from spangrad.errors import MissingExtraError, StoreError

if TYPE_CHECKING:
    from spangrad.store.base import Store

DEFAULT_STORE: Final = ".spangrad/store.duckdb"

StoreOption = Annotated[
    str,
    typer.Option("--store", envvar="SPANGRAD_STORE", help="DuckDB file, or address of a hub (http://...)."),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", envvar="SPANGRAD_KEY", help="Key for the hub.", show_envvar=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line, for scripts.")]
RolloutsOption = Annotated[
    list[str] | None, typer.Option("--rollout", "-r", help="Only this rollout; can be given several times.")
]
SqlOption = Annotated[
    str | None, typer.Option("--sql", help="Only rollouts in the column rollout_id of this SELECT.")
]
RunOption = Annotated[str | None, typer.Option("--run", help="Only rollouts of this training run.")]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", help="Only this split: train, eval-before-greedy, expert, recorded, ..."),
]
AuthorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--author",
        help="Whose rewards count: evaluator and operator, if not given, or agent; several times.",
    ),
]
RewardOption = Annotated[
    str | None,
    typer.Option("--reward", help="Name of the reward that counts; the config's, or `reward`, if not given."),
]
KeepUnknownToolsOption = Annotated[
    bool,
    typer.Option(
        "--keep-unknown-tools",
        help="Where --tokenizer renders: also calls whose tools nobody recorded; their prompts lack them.",
    ),
]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys", help="File with the keys of agent, evaluator, trainer and admin; made if it does not exist."
    ),
]

_EXTRAS: Final = {
    "train": ("torch", "transformers", "peft", "tokenizers", "safetensors", "ray"),
    "agents": ("langgraph", "langchain_openai", "openai"),
}
_VLLM_HINT: Final = (
    "`pip install 'spangrad[vllm]'` with a GPU, `make setup` in a clone without (see CONTRIBUTING.md)"
)


def is_hub(target: str) -> bool:
    """True for the address of a hub, False for a file."""
    return target.startswith(("http://", "https://"))


@contextmanager
def opened(
    target: str, key: str | None, *, to_write: bool = False, must_exist: bool = False
) -> "Iterator[Store]":
    """Open a store for one command, unless `to_write` beside others that read it.

    Traces that nobody has read yet are read first; a hub does that by itself.

    Raises:
        StoreError: There is no such store (a command that only reads makes none), or it can't be opened.
    """
    path = Path(target)
    makes = to_write and not must_exist
    if not makes and not is_hub(target) and not path.exists() and not Path(f"{target}.spool").exists():
        raise StoreError(
            f"there is no store at {target!r}; record one with `spangrad run -- python my_agent.py`,"
            " or name another with --store"
        )
    store: Store
    if to_write or is_hub(target):
        from spangrad.store import open_store

        store = open_store(target, key)
    else:
        from spangrad.store.reading import open_to_read

        store = open_to_read(target, read_traces=_read_traces)
    try:
        if to_write and not is_hub(target):
            _read_traces(store)
        yield store
    finally:
        store.close()


def _read_traces(store: "Store") -> None:
    from spangrad.adapters.accounts import account_unread

    account_unread(store)


def other_names(wanted: Collection[str], others: Mapping[str, int]) -> str:
    """What else than these rewards was given, and how it can be asked for."""
    counts = ", ".join(map(repr, wanted))
    told = ", ".join(f"{name!r} ({count} rollouts)" for name, count in others.items())
    return f"what counts is the reward {counts}; others that were given: {told}; --reward NAME asks for one"


def require(purpose: str, *extras: str) -> None:
    """Raise MissingExtraError with the command that installs it if a package of these extras is not there.

    `vllm` stands for the engine, whatever its distribution is called.
    """
    for extra in extras:
        for module in ("vllm",) if extra == "vllm" else _EXTRAS[extra]:
            if util.find_spec(module) is None:
                how = _VLLM_HINT if extra == "vllm" else f"`pip install 'spangrad[{extra}]'`"
                raise MissingExtraError(
                    f"{purpose} needs {module}, which is not installed; install it with {how}"
                )


def log_to_stderr() -> None:
    """Show what spangrad's own modules log; for commands that serve."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("spangrad")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that what a command started is stopped too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM has come, for work that ends between two steps; a second one interrupts.

    A step is not cut: DuckDB gives up a commit that a signal interrupts, with an error of its own.
    """
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
