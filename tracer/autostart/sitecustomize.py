"""Run by every Python that `spangrad run` starts: begin to record as soon as there is something to record.

Python imports `sitecustomize` from PYTHONPATH before the program. The tracer is set up when an HTTP client
that it captures is imported; a program without one pays for one small import. Its children are told all
the same.
Any other `sitecustomize` on the path runs after this one.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _start() -> None:
    try:
        from spangrad.tracer import children
        from spangrad.tracer.hooks import when_imported
    except ImportError as error:
        if "quiet=1" not in os.environ.get("SPANGRAD_ROLLOUT", "").split("&"):
            print(f"spangrad: {sys.executable} is not recorded: {error}", file=sys.stderr)
        return

    def begin(_: object) -> None:
        import spangrad

        spangrad.init()

    children.install()
    for name in ("httpx", "httpx2"):
        when_imported(name, begin)


def _run_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start()
_run_next()
