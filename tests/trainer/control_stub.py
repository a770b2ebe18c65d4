"""A server with vLLM's control endpoints whose weights are one number: every token's logprob.

A weights file holds that number as text. `refuses` is the reason for which it takes no file,
`breaks` that it fails in the middle of loading one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file, save_file
from tests.trainer.json_server import Replying, serving

from spangrad.trainer.serving.adapter_transfer import WEIGHTS, adapter_name
from spangrad.trainer.serving.checksums import with_checksums
from spangrad.trainer.serving.vllm_plugin import REFUSAL


@dataclass
class ControlStub:
    """State of one stub, shared with the test that started it."""

    url: str = ""
    version: str = "default"
    weights: float = -1.0
    refuses: str | None = None
    breaks: bool = False
    computes: float | None = None
    """What it computes whatever was loaded."""
    while_paused: Callable[[], object] | None = None
    """Called before weights are replaced."""
    while_asked: Callable[[], object] | None = None
    """Called while a chat is answered."""
    calls: int = 0
    """Chats that it answered."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Name and folder of each, in the order in which they were loaded."""
    events: list[tuple[str, str]] = field(default_factory=list)
    """(url, path with query) of what was posted; may be shared."""

    def answer(self, path: str, query: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights":
            if self.while_paused is not None:
                self.while_paused()
            if self.refuses is not None:
                return 500, {"error": {"message": f"{REFUSAL}{self.refuses}"}}
            if self.breaks:
                return 500, {"error": {"message": "worker died"}}
            self.weights = float(Path(body["update_info"]["path"]).read_text())
        elif path == "/finish_weight_update":
            self.version = body.get("weight_version", self.version)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/v1/models":
            entries: list[Any] = [{"id": "policy", "max_model_len": 64}]
            return 200, {"data": entries + [{"id": name, "parent": "policy"} for name in self.adapters]}
        elif path == "/v1/load_lora_adapter":
            if self.refuses is not None:
                return 500, {"error": {"message": self.refuses}}
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success"
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/v1/completions":
            loaded = self.adapters.get(body["model"])
            weights = self.weights if loaded is None else adapter_logprob(Path(loaded))
            logprob = weights if self.computes is None else self.computes
            rows = [
                [None, *({str(token): {"logprob": logprob}} for token in row[1:])] for row in body["prompt"]
            ]
            return 200, {"choices": [{"index": i, "prompt_logprobs": row} for i, row in enumerate(rows)]}
        elif path == "/v1/chat/completions":
            self.calls += 1
            if self.while_asked is not None:
                self.while_asked()
            return 200, {"choices": [], "model": body["model"]}
        return 200, {"weight_version": self.version, "success": True}


def make_adapter(root: Path, version: int, logprob: float) -> Path:
    """An adapter's folder whose only weight is that number."""
    tensors = {"logprob": torch.tensor([logprob])}
    root.mkdir(parents=True, exist_ok=True)
    save_file(tensors, root / "weights", metadata=with_checksums(tensors))
    folder = root / adapter_name("policy", version, root / "weights")
    folder.mkdir(exist_ok=True)
    (root / "weights").replace(folder / WEIGHTS)
    return folder


def adapter_logprob(folder: Path) -> float:
    """The number in it."""
    return float(load_file(folder / WEIGHTS)["logprob"])


@contextmanager
def control_stub(port: int = 0, events: list[tuple[str, str]] | None = None) -> Iterator[ControlStub]:
    """Serve a stub in a thread; 0 picks a free port."""
    stub = ControlStub(events=[] if events is None else events)

    class Handler(Replying):
        def do_GET(self) -> None:
            text = self.content()
            parts = urlsplit(self.path)
            if self.command == "POST":
                stub.events.append((stub.url, self.path))
            status, value = stub.answer(parts.path, parts.query, json.loads(text or b"{}"))
            # vLLM tells of adapters in plain text.
            self.reply(value.encode() if isinstance(value, str) else json.dumps(value).encode(), status)

        do_POST = do_GET

    with serving(Handler, port) as url:
        stub.url = url
        yield stub
