"""Turn the spans that an agent already emits into gradients for the model behind it.

    import spangrad

    spangrad.init()

    @spangrad.rollout
    def answer(question): ...

The names load on first use: `import spangrad` alone costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spangrad.store.feedback import feedback
    from spangrad.tracer.current import current_rollout
    from spangrad.tracer.hops import RolloutMiddleware, continue_rollout, rollout_headers
    from spangrad.tracer.rollout import rollout
    from spangrad.tracer.setup import flush, init, shutdown
    from spangrad.tracer.structure.marks import purpose, reward, state, step, tool

__version__ = "0.1.0"
__all__ = [
    "RolloutMiddleware",
    "__version__",
    "continue_rollout",
    "current_rollout",
    "feedback",
    "flush",
    "init",
    "purpose",
    "reward",
    "rollout",
    "rollout_headers",
    "shutdown",
    "state",
    "step",
    "tool",
]

_HOME = {
    "RolloutMiddleware": "spangrad.tracer.hops",
    "continue_rollout": "spangrad.tracer.hops",
    "current_rollout": "spangrad.tracer.current",
    "feedback": "spangrad.store.feedback",
    "flush": "spangrad.tracer.setup",
    "init": "spangrad.tracer.setup",
    "purpose": "spangrad.tracer.structure.marks",
    "reward": "spangrad.tracer.structure.marks",
    "rollout": "spangrad.tracer.rollout",
    "rollout_headers": "spangrad.tracer.hops",
    "shutdown": "spangrad.tracer.setup",
    "state": "spangrad.tracer.structure.marks",
    "step": "spangrad.tracer.structure.marks",
    "tool": "spangrad.tracer.structure.marks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spangrad' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
