"""Several learners that train one policy, behind the interface of one: processes of Ray Train.

    loop -> LearnerGroup (actor) --- command ---> rank 0, rank 1, ... (Ray Train; each has a Learner)
                      ^------------- answers -----------'

Ray Train finds the processes a place together, and torch their process group. Its training function asks for
commands until there are no more.

Knows Ray Train and the methods of `Learner`. Does not know: models, losses, the loop.

Invariants:
* a command is done by all ranks or is an error; what it returns is the first rank's answer;
* an error that all ranks raise, such as rows that can't train anything, leaves them in step: the next command
  may be made;
* a rank that dies, or that fails while others wait for it, ends the group: this call and all later ones are
  an error that says so, and nothing hangs.
"""

import tempfile
import threading
from dataclasses import replace
from typing import Any, cast

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from spangrad.errors import ClusterError
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.ranks import Ranks
from spangrad.trainer.places import Mark

GRACE_S = 20.0
"""How long the other ranks have to answer, once one has failed; Ray Train looks after them every 2 s."""
COLLECTIVE_S = 24 * 3600
"""torch's own limit of waiting for other ranks. A slow one is not lost; one that is gone closes its
connections, and Ray Train tells."""

RANKS = "ranks"
"""The actor's threads that ranks wait in, one for each; the loop's calls have one of their own."""


class LearnerGroup:
    """What `Learner` offers to the loop, done by all ranks; an actor with the concurrency group `RANKS`."""

    def __init__(
        self,
        config: LearnerConfig,
        worker_env: dict[str, Any] | None = None,
        scaling: dict[str, Any] | None = None,
        mark: Mark | None = None,
    ) -> None:
        """Start the ranks; errors while they load surface at the first call.

        Args:
            config: Of every learner; `workers` of them.
            worker_env: Ray's runtime environment for the processes.
            scaling: What each needs of its node, and how they lie to each other, for Ray's `ScalingConfig`.
            mark: What shows whether a worker's machine sees the run's folder; None: all is on one.
        """
        self._config = config
        self._scaling = scaling or {}
        self._mark = mark
        self._changed = threading.Condition()
        self._command: tuple[int, Any] = (0, None)  # the first one is to load, and needs nothing said
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._lost: str | None = None
        handle = ray.get_runtime_context().current_actor
        threading.Thread(target=self._run, args=(handle, worker_env), daemon=True).start()

    def update(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.update`."""
        return self._all("update", arguments, named)

    def trained_calls(self) -> Any:
        """`Learner.trained_calls`."""
        return self._all("trained_calls", (), {})

    def fit_bc(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.fit_bc`."""
        return self._all("fit_bc", arguments, named)

    def score(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.score`."""
        return self._all("score", arguments, named)

    def values(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.values`."""
        return self._all("values", arguments, named)

    def export_weights(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.export_weights`; every rank gathers, the first one writes."""
        return self._all("export_weights", arguments, named)

    def export_adapter(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.export_adapter`; the first rank writes."""
        return self._all("export_adapter", arguments, named)

    def export_model(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.export_model`; every rank gathers, the first one writes."""
        return self._all("export_model", arguments, named)

    def save(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.save`; every rank gathers, the first one writes."""
        return self._all("save", arguments, named)

    def load(self, *arguments: Any, **named: Any) -> Any:
        """`Learner.load`."""
        return self._all("load", arguments, named)

    @ray.method(concurrency_group=RANKS)
    def exchange(self, rank: int, number: int, answer: tuple[bool, Any]) -> Any:
        """Take a rank's answer to a command and return the next one, once there is one."""
        with self._changed:
            self._answers[rank] = answer
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._command[0] > number)
            return self._command

    def _run(self, handle: Any, worker_env: dict[str, Any] | None) -> None:
        """Have Ray Train run the ranks; returns when they have ended, which they do by being lost."""
        config, mark = self._config, self._mark
        has_gpus = config.device == "cuda"
        try:
            with tempfile.TemporaryDirectory(prefix="spangrad-learners-") as folder:
                TorchTrainer(
                    lambda: _serve(handle, config, mark),
                    torch_config=TorchConfig(backend="nccl" if has_gpus else "gloo", timeout_s=COLLECTIVE_S),
                    scaling_config=cast(Any, ScalingConfig)(
                        num_workers=config.workers, use_gpu=has_gpus, **self._scaling
                    ),
                    run_config=cast(Any, RunConfig)(storage_path=folder, worker_runtime_env=worker_env),
                ).fit()
            said = "its process has ended"
        except Exception as error:  # of a thread: it must reach those who wait
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        with self._changed:
            self._lost = said
            self._changed.notify_all()

    def _all(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        with self._changed:
            self._wait()
            if self._command[0] == 0 or self._lost is not None:  # what a call raised is said already
                self._result()
            # Through the object store: rows are there once for all ranks of a machine.
            self._answers = {}
            self._command = (self._command[0] + 1, ray.put((method, arguments, named)))
            self._changed.notify_all()
            self._wait()
            return self._result()

    def _wait(self) -> None:
        """Until every rank has answered, or one has failed and the others had their time."""

        def is_over() -> bool:
            return self._lost is not None or len(self._answers) == self._config.workers

        self._changed.wait_for(lambda: is_over() or self._has_failed())
        if not self._changed.wait_for(is_over, timeout=GRACE_S):
            self._lost = "it failed, and the others wait for it"

    def _has_failed(self) -> bool:
        return any(not is_good for is_good, _ in self._answers.values())

    def _result(self) -> Any:
        """The first rank's answer.

        Raises:
            ClusterError: A worker was lost.
            Exception: What the ranks raised.
        """
        errors = [value for _, (is_good, value) in sorted(self._answers.items()) if not is_good]
        if self._lost is not None:
            said = f"; another one says: {errors[0]}" if errors else ""
            raise ClusterError(
                f"a learner worker of {self._config.workers} was lost: {self._lost}{said}; start the run "
                "again, it goes on from its last checkpoint (learner.workers may differ)"
            )
        if errors:
            raise errors[0]
        return self._answers[0][1]


def _serve(group: Any, config: LearnerConfig, mark: Mark | None) -> None:
    """A rank: make a learner, then do what the group says, until the process is ended."""
    context = get_context()
    rank, number = context.get_world_rank(), 0
    answer: tuple[bool, Any] = (True, None)
    try:
        if mark is not None:
            mark.check("a learner worker")
        learner = _learner(config, Ranks(rank, context.get_world_size(), config.sharding == "fsdp2"))
    except Exception as error:  # it is the answer, to be raised where the call was made
        learner, answer = None, (False, error)
    while True:
        number, command = ray.get(group.exchange.remote(rank, number, answer))
        method, arguments, named = ray.get(command)
        try:
            result = getattr(learner, method)(*arguments, **named)
            answer = (True, result if rank == 0 else None)
        except Exception as error:  # likewise
            answer = (False, error)


def _learner(config: LearnerConfig, ranks: Ranks) -> Learner:
    """A rank's learner, on a device of its own."""
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Learner(replace(config, device=str(device), workers=1, sharding="ddp"), ranks)
