"""Make a small policy from nothing: tokenizer, chat template with tools, random weights.

Knows how a conversation becomes text and tokens, and the shape of the model; knows nothing
of tasks, training or serving. The folder it writes is in Hugging Face format, for
transformers and vLLM alike (tool-call parser `hermes`).

Invariants:

* The prompt of a later call begins, token for token, with the prompt and the reply of the
  call before, if the reply was well-formed: as the `hermes` parser reads it, as a client
  sends it back, rendered again, it is the text that was sampled.
* Tool-call arguments that are a string are rendered as they are.
* The marks of a tool call are ordinary text to the tokenizer's decoder: they survive
  `skip_special_tokens=True`, which is what the parser gets.
* The same conversations and the same seed give the same folder, byte for byte.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from spangrad.adapters.model_call import ModelCall
from spangrad.errors import PolicyError

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")

# Tools are named with their parameters alone, and no newline is left to the template's
# own layout: every token of the prompt is paid for in every call.
CHAT_TEMPLATE = (
    "{% if tools or (messages and messages[0].role == 'system') %}"
    "{{ '<|im_start|>system' }}"
    "{% if messages and messages[0].role == 'system' %}{{ '\\n' + (messages[0].content or '') }}{% endif %}"
    "{% for tool in tools or [] %}{% set function = tool.function if tool.function is defined else tool %}"
    "{{ '\\n' + function.name + '(' + (function.parameters.properties | default({}) | join(', ')) + ')' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{% set arguments = call.function.arguments %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ arguments if arguments is string else (arguments | tojson) }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endgeneration %}"
    "{{ '\\n' }}"
    "{% elif not (message.role == 'system' and loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The envelope of a tool call is one piece, so that it can become one token: a decision
# for a tool is then one sampled token, and replies get a third shorter. Otherwise words,
# single digits, and runs of punctuation.
_PIECES = (
    r'\n\{"name": "\w+", "arguments": \{"\w+": "'
    r'|"\}\}\n'
    r"| ?[A-Za-z_]+"
    r"|[0-9]"
    r"| ?[^\sA-Za-z_0-9]+(?: [^\sA-Za-z_0-9]+)*"
    r"|\s+"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in OpenAI chat form, with the tools that were on offer."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = field(default=())


def conversation_of(call: ModelCall) -> Conversation:
    """Everything a call's model read and wrote, as one conversation (its first choice)."""
    replies = [choice.message for choice in call.choices[:1]]
    return Conversation([*call.messages, *replies], call.tools)


def render(conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
    """A conversation as the text that the policy reads."""
    rendered: Any = render_jinja_template(  # its annotation is wrong: (texts, masks)
        conversations=[[dict(message) for message in conversation.messages]],
        tools=[dict(tool) for tool in conversation.tools] or None,
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=add_generation_prompt,
    )
    return str(rendered[0][0])


def make_tokenizer(texts: Sequence[str], *, vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on rendered conversations and give it the chat template.

    Any text can be encoded, not only what looks like `texts`. The vocabulary has at most
    `vocab` tokens, fewer if the texts offer no more merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab - len(TOOL_CALL_TOKENS),
            special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_CALL_TOKENS])
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[START_TOKEN],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_policy(
    folder: Path,
    conversations: Sequence[Conversation],
    *,
    hidden: int = 192,
    layers: int = 3,
    heads: int = 6,
    vocab: int = 1024,
    max_length: int = 1024,
    seed: int = 0,
) -> None:
    """Write a policy with random weights whose tokenizer fits the conversations.

    Args:
        folder: Where to write; made if missing, files of the same name are replaced.
        conversations: What the tokenizer is trained on.
        hidden: Width of the model, a multiple of `heads`.
        layers: Number of layers.
        heads: Attention heads; half as many for keys and values if that divides.
        vocab: Largest size of the vocabulary, at least 300.
        max_length: Longest prompt plus reply, in tokens.
        seed: Of the random weights.

    Raises:
        PolicyError: No conversations, or sizes that don't fit each other.
    """
    if not conversations:
        raise PolicyError("no conversations to train a tokenizer on; record some rollouts first")
    if hidden % (2 * heads) or vocab < 300:
        raise PolicyError(
            f"hidden={hidden}, heads={heads}, vocab={vocab} make no model;"
            " hidden must be a multiple of 2 * heads, vocab at least 300"
        )
    tokenizer = make_tokenizer([render(conversation) for conversation in conversations], vocab=vocab)
    pad_id, end_id = (tokenizer.get_vocab()[token] for token in (PAD_TOKEN, END_TOKEN))
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_length,
        # A tied head has a packed copy in vLLM on CPU that weight updates must refresh by hand.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # vLLM reads its default sampling parameters here; an empty set means plain sampling.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_id}))
