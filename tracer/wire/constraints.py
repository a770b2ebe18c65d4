"""Whether tokens of a reply could be anything but the policy's own choice.

Knows the request fields with which OpenAI, Anthropic, vLLM 0.32 and SGLang mask the distribution or put
tokens in: grammars, forced and strict tools, token masks, budgets that end a turn's thinking.

Not among them, for tokens and distribution stay the policy's: stop strings and stop tokens,
`ignore_eos`, a token limit, `repetition_detection` (they only end the reply, or do not), a prefilled
reply (`continue_final_message`: it is part of the prompt), temperature and the like (they are sampling
parameters, and graded as such). A server's own flags (`--tool-strict-level`, logits processors) are in
no request.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

_GRAMMARS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    *("regex", "ebnf", "json_schema"),  # SGLang
)
_MASKS = (
    "guided_decoding",
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "watermarking",
    "use_beam_search",
)
_FORMATS = ("response_format", "text", "output_config")
_BUDGETS = ("thinking_token_budget", "thinking", "min_tokens")
_RARE = frozenset(_GRAMMARS + _MASKS + _FORMATS + _BUDGETS)
_OF_TOOLS = frozenset({"tools", "tool_choice", "function_call"})
_FREE_TOOL_CHOICES = ("auto", "none")


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Whether a request asks for anything that takes a token's choice from the policy."""
    fields = request.keys()
    if not fields.isdisjoint(_RARE) and (
        any(request.get(field) is not None for field in _GRAMMARS)
        or any(request.get(field) for field in _MASKS)
        or _has_format(request)
        or _has_forced_tokens(request)
    ):
        return True
    return not fields.isdisjoint(_OF_TOOLS) and _has_forced_tools(request)


def _has_format(request: Mapping[str, Any]) -> bool:
    """A grammar for the whole reply: chat, Responses, Anthropic."""
    forms = [request.get("response_format")]
    for field in ("text", "output_config"):
        config = request.get(field)
        forms.append(config.get("format") if isinstance(config, Mapping) else None)
    return any(isinstance(form, Mapping) and form.get("type") not in (None, "text") for form in forms)


def _has_forced_tokens(request: Mapping[str, Any]) -> bool:
    """A used-up budget puts in the end of thinking; `min_tokens` masks the end of the reply."""
    budgets = [request.get("thinking_token_budget")]
    thinking = request.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") == "enabled":
        budgets.append(thinking.get("budget_tokens"))
    if any(_is_number(budget) and budget >= 0 for budget in budgets):
        return True
    least = request.get("min_tokens")
    return _is_number(least) and least > 0


def _has_forced_tools(request: Mapping[str, Any]) -> bool:
    """A tool must be called, only one may be, or its arguments must fit its schema."""
    choice = request.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(request.get("function_call"), Mapping):
        return True
    if choice is not None and kind not in _FREE_TOOL_CHOICES:
        return True
    tools = request.get("tools")
    if kind == "none" or not isinstance(tools, list | tuple) or not tools:
        return False
    if request.get("parallel_tool_calls") is False:  # vLLM then forces the form of a call
        return True
    if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True:
        return True
    return any(_is_strict(tool) for tool in tools)


def _is_strict(tool: Any) -> bool:
    if not isinstance(tool, Mapping):
        return False
    function = tool.get("function")
    return tool.get("strict") is True or (isinstance(function, Mapping) and function.get("strict") is True)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
