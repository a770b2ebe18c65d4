"""What a publish of a 135M policy to a running engine takes, beside reading its bytes and vLLM's own load."""

import json
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from spangrad.trainer.learning.model import save_weights, weight_tensors
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.checksums import check_weights
from spangrad.trainer.serving.engine import Engine, EngineConfig
from spangrad.trainer.serving.fleet import Fleet
from spangrad.trainer.serving.publish import served_version
from tests.bench.figures import Figure
from tests.trainer.small_policy import make_tokenizer

DTYPE = torch.bfloat16
STREAMED = 150
"""Tokens of the completion that runs during a publish: long enough that it does not end before."""


def make_folder(folder: Path) -> LlamaForCausalLM:
    """A random Llama of SmolLM2-135M's shape, and its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    model.float()
    return model


@dataclass
class Stream:
    """A completion that runs while weights change: the longest wait between two of its tokens."""

    url: str
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    is_begun: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        sampling = {"max_tokens": STREAMED, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        prompt = np.random.default_rng(0).integers(3, 250, 64).tolist()
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", f"{self.url}/inference/v1/generate", json=body, timeout=300.0) as reply:
            reply.raise_for_status()
            last = None
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                self.tokens += sum(len(c["token_ids"] or []) for c in json.loads(line[6:])["choices"])
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                if self.tokens >= 8:
                    self.is_begun.set()


def bench_publish(*, blocks: int = 5) -> list[Figure]:
    """Seconds of a publish and its parts, and the longest gap of a stream that ran meanwhile."""
    disable_progress_bar()
    torch.set_num_threads(1)  # the engine has the other core
    with tempfile.TemporaryDirectory() as root:
        folder, weights = Path(root) / "policy", Path(root) / "weights.safetensors"
        model = make_folder(folder)
        config = EngineConfig(
            model=str(folder), port=free_port(), dtype="bfloat16", log=str(Path(root) / "engine.log")
        )
        with Engine(config) as engine:
            return _measured(engine.url, model, weights, blocks)


def _measured(url: str, model: PreTrainedModel, weights: Path, blocks: int) -> list[Figure]:
    seconds: dict[str, list[float]] = {
        name: [] for name in ("save", "publish", "read", "load", "check", "gap")
    }
    for block in range(-1, blocks):
        stream = Stream(url)
        thread = threading.Thread(target=stream.run)
        thread.start()
        assert stream.is_begun.wait(120.0)
        began = time.perf_counter()
        save_weights(weight_tensors(model, dtype=DTYPE), weights)
        saved = time.perf_counter()
        Fleet([url]).publish(weights, block + 1)
        published = time.perf_counter()
        assert thread.is_alive()
        thread.join()
        assert served_version(url) == block + 1 and stream.tokens == STREAMED
        found = {"save": saved - began, "publish": published - saved, "gap": max(stream.gaps)}
        found |= _parts(url, weights)
        if block >= 0:
            for name, value in found.items():
                seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    floors = [read + load for read, load in zip(seconds["read"], seconds["load"], strict=True)]
    ratios = [own / floor for own, floor in zip(seconds["publish"], floors, strict=True)]
    ends = [save + own for save, own in zip(seconds["save"], seconds["publish"], strict=True)]
    gigabytes = weights.stat().st_size / 1e9
    return [
        Figure(
            "publish of 135M bfloat16, from the learner's weights to served ones",
            statistics.median(ends),
            "s",
            at_most=2.0,
            note=f"of which saving {median['save']:.2f}",
        ),
        Figure(
            "the same from the file on",
            statistics.median(ratios),
            "of read + load",
            at_most=1.5,
            note=f"{median['publish']:.2f} s; read {median['read']:.2f}, vLLM's reload {median['load']:.2f}",
        ),
        Figure(
            "its checksums",
            median["check"] / gigabytes,
            "s/GB",
            note=f"{median['check']:.3f} s for {gigabytes:.2f} GB",
        ),
        Figure(
            "longest gap of a stream during it",
            median["gap"],
            "s",
            at_most=3.0,
            note=f"worst of {blocks}: {max(seconds['gap']):.2f}",
        ),
    ]


def _parts(url: str, weights: Path) -> dict[str, float]:
    """What a publish can't do without, and what checking adds, each by itself."""
    times: dict[str, float] = {}
    began = time.perf_counter()
    weights.read_bytes()
    times["read"] = time.perf_counter() - began
    httpx.post(f"{url}/pause?mode=keep", timeout=60.0).raise_for_status()
    began = time.perf_counter()
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.parent / "policy")}}
    httpx.post(f"{url}/collective_rpc", json=reload, timeout=120.0).raise_for_status()
    times["load"] = time.perf_counter() - began
    httpx.post(f"{url}/resume", timeout=60.0).raise_for_status()
    began = time.perf_counter()
    check_weights(weights, None)
    times["check"] = time.perf_counter() - began
    return times
