"""A random small model that vLLM serves, and what transformers computes with the same weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spangrad.trainer.serving.checksums import with_checksums
from tests.trainer.small_policy import make_tokenizer

VOCABULARY = 320


def make_served_model(folder: Path, *, is_tied: bool) -> Path:
    """A model folder with vLLM-sized heads: Qwen3 with a tied head, or Llama with one of its own."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": is_tied,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = Qwen3Config(**shape) if is_tied else LlamaConfig(**shape)
    kind: Any = Qwen3ForCausalLM if is_tied else LlamaForCausalLM
    model = kind(config)
    # Defaults that nobody asked for: an engine that applied them would sample from another distribution.
    model.generation_config.update(do_sample=True, temperature=0.5, top_k=3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def moved_weights(folder: Path, path: Path, *, seed: int, scale: float = 0.05) -> Path:
    """The folder's weights with noise added, as one file with checksums."""
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(moved, path, metadata=with_checksums(moved))
    return path


def learner_logprobs(
    folder: Path, weights: Path, rows: Sequence[Sequence[int]]
) -> list[np.ndarray[Any, Any]]:
    """Logprob of every token but the first of each row, by transformers in float32 at temperature 1."""
    kind = Qwen3ForCausalLM if "Qwen3" in (folder / "config.json").read_text() else LlamaForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    found = []
    for row in rows:
        ids = torch.tensor([list(row)])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
        found.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return found


def random_rows(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Rows of token ids."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = rng.integers(3, VOCABULARY, (count, length)).tolist()
    return rows
