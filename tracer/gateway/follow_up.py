"""Send follow-up calls with the rollout's own ids, and check that the engine took them.

    request --> tokens_in.Turns: which turn does it continue?
            --> engine: POST /tokenize, three times at once
            --> tokens_in.prompt_ids --> kv_transfer_params.prompt_token_ids

Invariants: whatever goes wrong here, the plain request is sent, and the span says why; a turn
can be continued as soon as its client can know that it is over.

Knows HTTP to engines and vLLM's JSON. Knows no spans.
"""

import asyncio
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import httpx

from spangrad.tracer.gateway.engine import Engine
from spangrad.tracer.gateway.reply import Reply, ReplyChoice
from spangrad.tracer.gateway.rewrite import UpstreamRequest, dump
from spangrad.tracer.gateway.tokens_in import (
    Continuation,
    Fallback,
    Owner,
    Turns,
    prompt_ids,
    renderings,
    unfit,
)

logger = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_S = 10.0
MAX_MODELS = 64
"""Models whose end of a turn is remembered."""
CUT_REASONS = ("length", "repetition")
"""Finish reasons of a reply that has no end."""
ENDED_REASONS = ("stop", "tool_calls", "function_call")


class TokensIn:
    """What all calls of a gateway share."""

    def __init__(self) -> None:
        """Nothing is remembered."""
        self._turns = Turns()
        self._ends: OrderedDict[str, set[int]] = OrderedDict()
        self._used = 0
        self._failed = 0
        self._fallbacks: Counter[str] = Counter()

    def start(self, rollout_id: Any, attempt: Any, request: UpstreamRequest) -> "FollowUp":
        """Begin a call."""
        owner = (str(rollout_id), int(attempt or 0)) if rollout_id is not None else None
        return FollowUp(self, owner, request)

    def counts(self) -> dict[str, Any]:
        """How calls were sent: with own ids, plainly and why, and where the engine did not take the ids."""
        return {"used": self._used, "fallback": dict(self._fallbacks), "failed": self._failed}

    def find(self, owner: Owner | None, request: Any) -> Continuation | Fallback:
        """The turn that a request continues, or why there is none."""
        if owner is None:
            return Fallback("the call belongs to no rollout")
        return unfit(request) or self._turns.find(owner, request)

    def ends(self, model: str) -> set[int]:
        """Ids with which a model's replies have ended by themselves."""
        ends = self._ends.setdefault(model, set())
        self._ends.move_to_end(model)
        if len(self._ends) > MAX_MODELS:
            self._ends.popitem(last=False)
        return ends

    def remember(
        self, owner: Owner, request: Mapping[str, Any], prompt: list[int], choice: ReplyChoice
    ) -> None:
        """Let a choice be continued, if it came to an end."""
        ids, reason = choice.token_ids, choice.finish_reason
        is_cut = reason in CUT_REASONS or isinstance(choice.stop_reason, str)
        if not ids or not (is_cut or reason in ENDED_REASONS):
            return
        if not is_cut and choice.stop_reason is None:
            self.ends(str(request.get("model"))).add(ids[-1])
        self._turns.remember(owner, request, choice.message, [*prompt, *ids], is_cut=is_cut)

    def count(self, outcome: str) -> None:
        """Count how a call was sent."""
        kind, _, reason = outcome.partition(": ")
        if kind == "used":
            self._used += 1
        elif kind == "failed":
            self._failed += 1
        else:
            self._fallbacks[reason.partition(": ")[0]] += 1


class FollowUp:
    """One call."""

    def __init__(self, shared: TokensIn, owner: Owner | None, request: UpstreamRequest) -> None:
        """Nothing is sent yet."""
        self._shared = shared
        self._owner = owner
        self._request = request
        self._body: Any = None
        """What the engine is asked, before ids are added."""
        self._sent: list[int] | None = None
        self.outcome: str | None = None
        """`used`, `fallback: <reason>` or `failed: <reason>`."""

    async def content(self, engine: Engine, headers: Mapping[str, str]) -> bytes:
        """The body for the engine: with ids if they can be had, else the plain one."""
        try:
            self._body = json.loads(self._request.content)
            ids = await self._ids(engine, headers)
        except httpx.HTTPError as error:
            ids = Fallback(f"the engine does not render: {type(error).__name__}")
        except Exception as error:  # boundary: foreign data, and the plain request can always be sent
            ids = Fallback(f"the request can't be read: {type(error).__name__}: {error}")
        if isinstance(ids, Fallback):
            self._sent, self.outcome = None, f"fallback: {ids.reason}"
            return self._request.content
        self._sent, self.outcome = ids, "used"
        return dump({**self._body, "kv_transfer_params": {"prompt_token_ids": ids}})

    def end(self, reply: Reply) -> None:
        """The reply is over and the client does not know it yet: check it, and let it be continued."""
        prompt = reply.prompt_token_ids
        if self._sent is not None and prompt is not None and prompt != self._sent:
            self.outcome = f"failed: the engine reports another prompt of {len(prompt)} tokens"
            logger.warning("tokens-in: sent %d prompt ids, but %s", len(self._sent), self.outcome)
        if self.outcome is not None:
            self._shared.count(self.outcome)
        if self._owner is None or not isinstance(self._body, dict) or not prompt:
            return
        for choice in reply.choices.values():
            try:
                self._shared.remember(self._owner, self._body, prompt, choice)
            except Exception:  # boundary: foreign data, and the client waits for its reply
                logger.warning("tokens-in: a reply can't be remembered", exc_info=True)

    async def _ids(self, engine: Engine, headers: Mapping[str, str]) -> list[int] | Fallback:
        found = self._shared.find(self._owner, self._body)
        if isinstance(found, Fallback):
            return found
        bodies = renderings(self._body, found.reply_index)
        rendered = await asyncio.gather(*(_tokenize(engine, body, headers) for body in bodies))
        whole, other, earlier = rendered
        if whole is None or other is None or earlier is None:
            return Fallback("the engine does not render: it refused or gave no tokens")
        return prompt_ids(found.turn, whole, other, earlier, self._shared.ends(str(self._body.get("model"))))


async def _tokenize(engine: Engine, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
    response = await engine.client.post(
        f"{engine.url}/tokenize", content=dump(body), headers=headers, timeout=TOKENIZE_TIMEOUT_S
    )
    data = response.json() if response.is_success else None
    tokens = data.get("tokens") if isinstance(data, dict) else None
    return tokens if isinstance(tokens, list) else None
