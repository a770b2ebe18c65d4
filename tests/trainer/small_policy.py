"""A small random policy folder with its own tokenizer and chat template, and rows to train it on."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spangrad.credit.transition import CallSegment, Transition

TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool.function | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ ARGUMENTS }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STRINGS_AS_THEY_ARE = (
    "call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson)"
)
ALWAYS_SERIALISED = "call.function.arguments | tojson"
CORPUS = [
    "<|im_start|>user\nHow many orders does ann have?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "query", "arguments": {"sql": "SELECT count(*) FROM orders"}}\n</tool_call><|im_end|>\n'
] * 4


def make_tokenizer(arguments: str = STRINGS_AS_THEY_ARE) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE.replace("ARGUMENTS", arguments)
    return tokenizer


def make_model(*, hidden: int = 32, layers: int = 2, vocab: int = 320, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_policy(folder: Path, *, hidden: int = 32, layers: int = 2) -> Path:
    make_model(hidden=hidden, layers=layers).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_row(
    seed: int, *, tokens: int = 24, temperature: float = 1.0, vocab: int = 320, grade: str = "exact"
) -> Transition:
    """A row with about a third of its tokens sampled, plausible logprobs and random advantages."""
    rng = np.random.default_rng(seed)
    mask = rng.random(tokens) < 0.35
    mask[0] = False
    mask[min(3, tokens - 1)] = True
    return Transition(
        rollout_id=f"r{seed}",
        attempt=0,
        group_id=f"g{seed}",
        segments=(CallSegment(f"call{seed}", f"span{seed}", 0, 1, tokens),),
        token_ids=rng.integers(3, vocab, tokens).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.uniform(4.0, 7.0, tokens), np.nan).astype(np.float32),
        policy_versions=np.where(mask, 1, -1).astype(np.int32),
        advantages=np.where(mask, rng.normal(size=tokens), 0.0),
        loss_weight=1.0 / (8 * int(mask.sum())),
        grade=grade,
        temperature=temperature,
    )
