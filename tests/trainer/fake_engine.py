"""An engine's control endpoints over a real model, without vLLM: weights from a file, versions, logprobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.trainer.json_server import json_server
from transformers import LlamaForCausalLM

MAX_LENGTH = 128


class FakeEngine:
    """What an engine that somebody publishes to serves."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder)
        self.version = "default"
        self.published: list[int] = []
        """Versions in the order in which they were published."""
        self.swaps = 0
        """Publishes of which the gateway was told the end."""
        self.fails = False
        """Answer an update with 500."""
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path.partition("?")[0]:
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weights":
                self.model.load_state_dict(load_file(body["update_info"]["path"]))
            case "/finish_weight_update":
                self.version = body["weight_version"]
                self.published.append(int(self.version))
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/reset_prefix_cache":
                return {"success": True}
            case "/v1/models":
                return {"data": [{"id": "policy", "max_model_len": MAX_LENGTH}]}
            case "/v1/completions":
                return {"choices": [self._scored(i, row) for i, row in enumerate(body["prompt"])]}
            case "/spangrad/engines/swapped":
                self.swaps += 1
            case "/spangrad/health":
                return {"engine": {"reachable": True}}
        return {}

    def _scored(self, index: int, row: list[int]) -> dict[str, Any]:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([row])).logits[0].log_softmax(-1)
        told = [{str(token): {"logprob": float(logprobs[i, token])}} for i, token in enumerate(row[1:])]
        return {"index": index, "prompt_logprobs": [None, *told]}


@contextmanager
def fake_engine(folder: Path) -> Iterator[FakeEngine]:
    """Serve a model folder at `url`, as an engine and as the gateway before it."""
    engine = FakeEngine(folder)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        failed = engine.fails and path == "/update_weights"
        return (500, {}) if failed else (200, engine.answer(path, body))

    with json_server(answer) as engine.url:
        yield engine
