"""The gateway's own routes, for the trainer and for people: health, flush, swap, join, budgets and others.

Invariants: whatever changes something is refused to callers without an operator's key or, where there are
no such keys, on other machines, and only operators make the gateway ask its engines; nothing here is passed
on to an engine.
"""

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.budgets import MAX_TURNS
from spangrad.tracer.gateway.call import Services
from spangrad.tracer.gateway.config import base_url
from spangrad.tracer.gateway.engine import Engine, drained
from spangrad.tracer.gateway.http_parts import error_response, is_operator
from spangrad.tracer.gateway.raw_log import parse_json

LONGEST_STAY_S: Final = 3600.0
"""For which an engine joins at once."""
_BUDGETS: Final = '{"rollouts": [{"rollout_id": ID, "attempt": 0, "turns": 5}], "reply": TEXT or null}'
"""What `budgets` takes."""


class Operator:
    """Handlers of the routes below `/spangrad/`."""

    def __init__(self, services: Services) -> None:
        """Serve one gateway."""
        self._services = services

    async def health(self, request: Request) -> Response:
        """Whether engines answer, asked now for operators, and what has been recorded."""
        services = self._services
        engines = services.engines.engines
        if is_operator(request, services.config):
            timeout_s = services.config.health_timeout_s
            await asyncio.gather(*(engine.check(timeout_s) for engine in engines))
        # Rollout workers wait for `engine.reachable`: it speaks for all engines.
        shown = next((engine for engine in engines if engine.problem is None), services.engines.all[0])
        return JSONResponse(
            {
                "instance": services.instance,
                "engine": {
                    "url": shown.url,
                    "reachable": shown.problem is None,
                    **_policy_version(shown),
                },
                "engines": [_described(engine) for engine in services.engines.all],
                "calls": services.counts.calls,
                "failed": services.counts.failed,
                "spans": services.recorder.counts(),
                "budgets": {"rollouts": len(services.budgets), "beyond": services.budgets.beyond},
                **({} if services.tokens_in is None else {"tokens_in": services.tokens_in.counts()}),
            }
        )

    async def engines(self, request: Request) -> Response:
        """Every engine as it is known to be, without asking it, and the promoted version as it is known."""
        policies = self._services.policies
        promoted = {"version": policies.promoted, "problem": policies.problem}
        engines = [_described(engine) for engine in self._services.engines.all]
        return JSONResponse({"engines": engines, "promoted": promoted})

    async def drain(self, request: Request) -> Response:
        """Give an engine no new calls, and answer when it works on none; 503 if it still does."""
        engine = await self._named_engine(request)
        if isinstance(engine, Response):
            return engine
        engine.is_draining = True
        timeout_s = self._services.config.drain_timeout_s
        if await drained(engine, timeout_s):
            return JSONResponse({"engine": _described(engine)})
        message = (
            f"after {timeout_s:g} s {engine.url} still works on {engine.in_flight} calls; "
            "it gets no new ones, so ask again"
        )
        return JSONResponse({"engine": _described(engine), "message": message}, 503)

    async def undrain(self, request: Request) -> Response:
        """Give an engine calls again."""
        engine = await self._named_engine(request)
        if isinstance(engine, Response):
            return engine
        engine.is_draining, engine.stale = False, None
        return JSONResponse({"engine": _described(engine)})

    async def swap(self, request: Request) -> Response:
        """Leave an engine alone while its weights are replaced: others get its calls, or they wait."""
        engine = await self._named_engine(request)
        if isinstance(engine, Response):
            return engine
        longest_s = self._services.config.swap_timeout_s
        engine.swap.begin(longest_s)
        return JSONResponse({"engine": _described(engine), "timeout_s": longest_s})

    async def swapped(self, request: Request) -> Response:
        """Its new weights are there, and it gets calls; or, with `stale`, it gets none until they are."""
        engine = await self._named_engine(request)
        if isinstance(engine, Response):
            return engine
        stale = parse_json(await request.body()).get("stale")
        if not (stale is None or (isinstance(stale, str) and stale)):
            return error_response(400, "invalid_request", '"stale" is no text; say why, or leave it out')
        engine.stale = stale
        engine.forget_version()
        if stale is None and engine.problem is not None:
            await engine.check(self._services.config.health_timeout_s)
        engine.swap.end()
        return JSONResponse({"engine": _described(engine)})

    async def join(self, request: Request) -> Response:
        """Give one more engine calls for so many seconds; joining again in time lets it stay."""
        if not is_operator(request, self._services.config):
            return _not_an_operator()
        body = parse_json(await request.body())
        url, for_s = (body.get("engine"), body.get("for_s")) if isinstance(body, dict) else (None, None)
        for_s = for_s if isinstance(for_s, int | float) and not isinstance(for_s, bool) else 0.0
        if not (isinstance(url, str) and 0 < for_s <= LONGEST_STAY_S):
            message = f'the body lets no engine in; send {{"engine": URL, "for_s": 1 to {LONGEST_STAY_S:g}}}'
            return error_response(400, "invalid_request", message)
        try:
            engine = await self._services.engines.join(url, for_s)
        except ConfigError as error:
            return error_response(400, "invalid_request", str(error))
        return JSONResponse({"engine": _described(engine)})

    async def leave(self, request: Request) -> Response:
        """Give an engine that joined no more calls; those that it has go on."""
        engine = await self._named_engine(request)
        if isinstance(engine, Response):
            return engine
        if not self._services.engines.leave(engine):
            message = f"{engine.url} is an engine of the gateway's own settings; drain it"
            return error_response(409, "not_joined", message)
        return JSONResponse({"engine": _described(engine)})

    async def flush(self, request: Request) -> Response:
        """Answer when the spans of all calls that have ended are in the store; 503 if some still wait."""
        config, recorder = self._services.config, self._services.recorder
        if not is_operator(request, config):
            return _not_an_operator()
        if await recorder.flush(config.flush_timeout_s):
            return JSONResponse({"instance": self._services.instance, "spans": recorder.counts()})
        counts = recorder.counts()
        waiting = max(1, counts["waiting"])
        message = (
            f"after {config.flush_timeout_s:g} s at least {waiting} spans of ended calls are not in the "
            f"store {config.store!r}; they are kept and sent as soon as it takes them, so check that it "
            "runs and flush again"
        )
        reply = {"waiting": waiting, "message": message, "spans": counts}
        return JSONResponse({"instance": self._services.instance, **reply}, 503)

    async def refresh(self, request: Request) -> Response:
        """Forget the known policy versions: weights were published, or a version promoted."""
        if not is_operator(request, self._services.config):
            return _not_an_operator()
        self._services.engines.forget_versions()
        self._services.policies.forget()
        return JSONResponse({})

    async def budgets(self, request: Request) -> Response:
        """Give attempts of rollouts their turns; `reply` null: calls beyond them are errors."""
        if not is_operator(request, self._services.config):
            return _not_an_operator()
        body = parse_json(await request.body())
        try:
            rollouts, reply = _turns(body)
        except (TypeError, ValueError, KeyError) as error:
            message = f"the body gives no turns ({error}); send {_BUDGETS}"
            return error_response(400, "invalid_request", message)
        for rollout_id, attempt, turns in rollouts:
            self._services.budgets.give(rollout_id, attempt, turns, reply)
        return JSONResponse({"instance": self._services.instance, "rollouts": len(rollouts)})

    async def _named_engine(self, request: Request) -> Engine | Response:
        """The engine in the request's body, or the refusal."""
        if not is_operator(request, self._services.config):
            return _not_an_operator()
        body = parse_json(await request.body())
        name = body.get("engine") if isinstance(body, dict) else None
        if not isinstance(name, str):
            return error_response(400, "invalid_request", 'the body names no engine; send {"engine": URL}')
        engine = self._services.engines.find(base_url(name))
        if engine is None:
            known = ", ".join(engine.url for engine in self._services.engines.all)
            return error_response(404, "not_found", f"no engine {name!r}; there are: {known}")
        return engine


def _turns(body: Any) -> tuple[list[tuple[str, int, int]], str | None]:
    """(rollout, attempt, turns) of each, and the text beyond them. Raises what says why it is none."""
    reply = body["reply"]
    if reply is not None and not (isinstance(reply, str) and reply.strip()):
        raise TypeError(f"'reply' is {reply!r:.80}")
    (reply or "").encode()  # JSON can hold half characters, replies and files can't
    rollouts = []
    for entry in body["rollouts"]:
        rollout_id, attempt, turns = entry["rollout_id"], entry["attempt"], entry["turns"]
        if not isinstance(rollout_id, str) or not rollout_id:
            raise TypeError(f"'rollout_id' is {rollout_id!r:.80}")
        rollout_id.encode()
        for name, number, most in (("attempt", attempt, names.MAX_ATTEMPT), ("turns", turns, MAX_TURNS)):
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
                raise ValueError(f"{name!r} of {rollout_id!r:.80} is {number!r:.80}, expected 0 to {most}")
        rollouts.append((rollout_id, attempt, turns))
    return rollouts, reply


def _described(engine: Engine) -> dict[str, Any]:
    return {
        "url": engine.url,
        "healthy": engine.problem is None,
        "problem": engine.problem,
        "draining": engine.is_draining,
        "swapping": engine.swap.is_on,
        "stale": engine.stale,
        "in_flight": engine.in_flight,
        "calls": engine.calls,
        "models": list(engine.models),
        "adapters": dict(+engine.adapters.in_flight),
        "policy": engine.policy,
        **_policy_version(engine),
    }


def _policy_version(engine: Engine) -> dict[str, Any]:
    latest = engine.versions.latest
    return {
        "policy_version": latest.version if latest else None,
        "policy_version_problem": latest.problem if latest else None,
    }


def _not_an_operator() -> Response:
    return error_response(
        403,
        "forbidden",
        "only callers with an operator's key may do this, or on its own machine if it has no such keys",
    )
