"""Commands that keep running: hub, gateway, serve, up.

Each ends on Ctrl-C and on SIGTERM, and stops what it started.
"""

import json
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spangrad.commands.options import (
    DEFAULT_STORE,
    HostOption,
    KeyOption,
    KeysOption,
    StoreOption,
    is_hub,
    log_to_stderr,
    require,
    stop_on_sigterm,
)
from spangrad.commands.output import note
from spangrad.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from spangrad.store.keys import Keys

DEFAULT_ENGINE = "http://127.0.0.1:8000"
NameOption = Annotated[str, typer.Option("--name", help="Model name that agents ask for.")]
LengthOption = Annotated[
    int, typer.Option("--max-model-len", min=1, help="Longest prompt plus reply, in tokens.")
]
SeqsOption = Annotated[
    int, typer.Option("--max-num-seqs", min=1, help="Requests worked on at the same time.")
]
LoraRankOption = Annotated[
    int,
    typer.Option(
        "--lora-rank", min=0, max=512, help="Largest rank of adapters (serving.transfer = lora); 0: none."
    ),
]


class PolicyKind(StrEnum):
    """Whether the served model is the one that is trained."""

    TRAINED = "trained"
    FROZEN = "frozen"


class Fidelity(StrEnum):
    """How follow-up calls are sent to the engine."""

    AS_ASKED = "as-asked"
    TOKENS_IN = "tokens-in"


class Served(StrEnum):
    """Which version of the policy calls get that name none."""

    ANY = "any"
    LATEST = "latest"
    PROMOTED = "promoted"


def hub(
    store: StoreOption = DEFAULT_STORE,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 4318,
    keys: KeysOption = None,
    read_after: Annotated[
        float,
        typer.Option(
            "--read-after",
            min=0.0,
            help="Read the calls of a trace when nothing came of it for so many seconds.",
        ),
    ] = 3.0,
) -> None:
    """Serve a store over HTTP: spans in (OTLP), rollout queue, rewards, queries.

    One process owns the DuckDB file; agents, workers and trainers talk to
    it. Without --keys it listens on this machine only and every caller may
    do everything.

    Any OpenTelemetry SDK or Collector can send here. Beside, calls are read
    out of what came, graded, and joined to rollouts where none is named.
    """
    if is_hub(store):
        raise ConfigError(f"--store is {store!r}, the address of another hub; a hub needs a file")
    from spangrad.adapters.accounts import keep_accounts
    from spangrad.store.serve import serve

    log_to_stderr()
    serve(
        store,
        host=host,
        port=port,
        keys=_keys(keys),
        on_ready=lambda url: note(f"spangrad: hub at {url}, store {store}"),
        beside=partial(keep_accounts, quiet_s=read_after),
    )


def gateway(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help="Address of a vLLM server; may be repeated.",
            show_default="http://127.0.0.1:8000",
        ),
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option("--frozen", help="NAME=ADDRESS of a vLLM server whose model NAME is not trained."),
    ] = None,
    hosted: Annotated[
        list[str] | None,
        typer.Option("--hosted", help="NAME=PROVIDER/MODEL, or NAME={JSON}: a model that LiteLLM reaches."),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8100,
    keys: KeysOption = None,
    policy: Annotated[PolicyKind, typer.Option("--policy", help="Is this the model that is trained?")] = (
        PolicyKind.TRAINED
    ),
    serve_version: Annotated[
        Served, typer.Option("--serve", help="Version of calls that name none in x-spangrad-policy.")
    ] = Served.ANY,
    canary: Annotated[
        float | None,
        typer.Option("--canary", help="With --serve promoted: share of rollouts that get the latest."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Training run whose promoted version is meant.")
    ] = None,
    fidelity: Annotated[
        Fidelity,
        typer.Option(
            "--fidelity", help="tokens-in: send a rollout's follow-up calls with its own token ids."
        ),
    ] = Fidelity.AS_ASKED,
    redact: Annotated[
        str | None,
        typer.Option(
            "--redact",
            envvar="SPANGRAD_REDACT",
            help="Take texts out of spans before they leave the process: default, secrets or emails.",
        ),
    ] = None,
    raw_log: Annotated[
        Path | None, typer.Option("--raw-log", help="Append the engine's raw replies here.")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible address that records exact token ids.

    Agents in any language use http://HOST:PORT/v1 as their base URL. The
    gateway asks vLLM for token ids and logprobs, records them, and gives
    the agent the reply that it asked for. With --keys agents must send the
    agent's key. Of several engines a rollout keeps to one. A hosted model's
    calls are recorded as text and as frozen.

    Where engines serve different versions, the header x-spangrad-policy of
    a call, or --serve, says which one it gets: any, the latest, or the one
    that is promoted (`spangrad policies`).
    """
    from spangrad.tracer.gateway.config import EngineConfig, GatewayConfig
    from spangrad.tracer.gateway.serve import serve

    log_to_stderr()
    loaded = _keys(keys)
    serve(
        GatewayConfig(
            engines=[
                *(engine or ([] if frozen or hosted else [DEFAULT_ENGINE])),
                *(
                    EngineConfig(url, models=[name], policy="frozen")
                    for name, url in _named("--frozen", frozen, "NAME=ADDRESS")
                ),
            ],
            hosted={
                name: _hosted_model(text) for name, text in _named("--hosted", hosted, "NAME=PROVIDER/MODEL")
            },
            store=store,
            # An agent's key in the environment is the agents', not the gateway's.
            store_key=loaded.evaluator if loaded is not None and key in (None, loaded.agent) else key,
            host=host,
            port=port,
            agent_key=None if loaded is None else loaded.agent,
            operator_keys=() if loaded is None else loaded.operators,
            policy=policy.value,
            serve=serve_version.value,
            canary=canary,
            run=run,
            fidelity=fidelity.value,
            redact=redact,
            raw_log=raw_log,
        )
    )


def serve(
    model: Annotated[str, typer.Argument(help="Model folder in Hugging Face format.")],
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    name: NameOption = "policy",
    max_model_len: LengthOption = 1024,
    max_num_seqs: SeqsOption = 32,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of the model.")] = 1,
    lora_rank: LoraRankOption = 0,
    log: Annotated[Path, typer.Option("--log", help="File for vLLM's own output.")] = Path(
        ".spangrad/logs/engine.log"
    ),
) -> None:
    """Serve a model with vLLM, set up for recording and for weight updates.

    A model folder is any Hugging Face folder with a chat template that vLLM
    can serve; `spangrad demo` leaves its own in .spangrad/policies.
    Listens on 127.0.0.1. Put `spangrad gateway` in front of it to record,
    or use `spangrad up` for both.
    """
    require("`spangrad serve`", "vllm")
    from spangrad.trainer.serving.engine import Engine, EngineConfig

    engine = Engine(
        EngineConfig(
            model=model,
            port=port,
            served_model_name=name,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
            threads=threads,
            lora_rank=lora_rank,
            log=str(log),
        )
    )
    with stop_on_sigterm():
        try:
            engine.start()
            engine.wait_ready()
            note(f"spangrad: {name} is served at http://127.0.0.1:{port}/v1; Ctrl-C stops it")
            _wait_while(engine.is_alive)
            raise EngineError(f"the engine ended by itself; its output is in {str(log)!r}")
        except KeyboardInterrupt:
            note("spangrad: stopping")
        finally:
            engine.stop()


def up(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder; without one, hub and gateway only, for a vLLM server at --engine."
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Address of a vLLM server that runs already.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    folder: Annotated[str, typer.Option("--folder", help="Logs and keys go here.")] = ".spangrad",
    host: HostOption = "127.0.0.1",
    hub_port: Annotated[int, typer.Option("--hub-port", min=1, max=65535, help="Port of the hub.")] = 4318,
    gateway_port: Annotated[
        int, typer.Option("--gateway-port", min=1, max=65535, help="Port of the gateway.")
    ] = 8100,
    engine_port: Annotated[int, typer.Option("--engine-port", min=1, max=65535, help="Port of vLLM.")] = 8000,
    name: NameOption = "policy",
    max_model_len: LengthOption = 1024,
    max_num_seqs: SeqsOption = 32,
    lora_rank: LoraRankOption = 0,
) -> None:
    """Start hub, gateway and engine together on this machine, and keep them running.

    A model folder is any Hugging Face folder with a chat template that vLLM
    can serve; `spangrad demo` leaves its own in .spangrad/policies. Says
    which base URL and key an agent needs; one that `spangrad train` runs or
    asks (`agent.function`, `command` or `url`) gets both from there.
    """
    if is_hub(store):
        raise ConfigError(
            f"--store is {store!r}, the address of another hub; `spangrad up` starts its own on a file"
        )
    require("`spangrad up`", "train")
    if model is not None and engine is None:
        require("`spangrad up MODEL`", "vllm")
    from spangrad.trainer.up import UpConfig
    from spangrad.trainer.up import up as start

    with stop_on_sigterm():
        start(
            UpConfig(
                model=model,
                folder=folder,
                store=store,
                host=host,
                hub_port=hub_port,
                gateway_port=gateway_port,
                engine_port=engine_port,
                engine_url=engine,
                served_name=name,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                lora_rank=lora_rank,
            ),
            say=_say,
        )


def _named(option: str, entries: list[str] | None, form: str) -> list[tuple[str, str]]:
    pairs = [entry.partition("=") for entry in entries or ()]
    for name, _, value in pairs:
        if not name or not value:
            raise ConfigError(f"{option} has an entry without a name or a value; expected {form}")
    names = [name for name, _, _ in pairs]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ConfigError(f"{option} names {twice!r} twice; name each once")
    return [(name, value) for name, _, value in pairs]


def _hosted_model(text: str) -> str | dict[str, Any]:
    if not text.startswith("{"):
        return text
    try:
        settings: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError("--hosted has settings that are no JSON object") from error
    return settings


def _keys(file: Path | None) -> "Keys | None":
    if file is None:
        return None
    from spangrad.store.keys import Keys

    if file.exists():
        return Keys.load(file)
    keys = Keys.generate()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        keys.save(file)
    except OSError as error:
        raise ConfigError(f"keys can't be written to {str(file)!r}: {error.strerror}") from error
    note(f"spangrad: new keys for agent, evaluator, trainer and admin are in {file}")
    return keys


def _say(text: str) -> None:
    print(text, flush=True)


def _wait_while(is_alive: Callable[[], bool]) -> None:
    while is_alive():
        time.sleep(0.5)
