"""Places in a Ray cluster that a run holds for itself, and whether what runs there sees the run's files.

    with Places("engines", {"CPU": 1, "engine": 1}, 2, "spread", within_s=60) as places:
        ray.remote(Engine).options(num_cpus=1, resources={"engine": 1}, **places.options(0))

Knows Ray's placement groups. Does not know what goes there.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from spangrad.errors import ClusterError
from spangrad.trainer.cluster_config import Placement

SEEN_WITHIN_S: Final = 10.0
"""How long a file may take to be seen elsewhere: shared disks remember for a while what was not there."""


def node_address() -> str:
    """The address by which other nodes reach this one."""
    return str(cast(Any, get_node_ip_address)())


class Places:
    """As many equal places as asked for; `with` gives them back."""

    def __init__(
        self, who: str, each: Mapping[str, float], count: int, placement: Placement, *, within_s: float
    ) -> None:
        """Reserve them.

        Args:
            who: What goes there, for people.
            each: What one place holds; not empty.
            count: How many.
            placement: How they lie to each other.
            within_s: How long that may take.

        Raises:
            ClusterError: The cluster has no such places.
        """
        self._group = placement_group([dict(each)] * count, strategy=placement.upper())
        if self._group.wait(within_s):
            return
        self.release()
        raise ClusterError(
            f"the Ray cluster has no place for {count} {who} ({placement}), each with {_told(each)}, in"
            f" {within_s:g} s; free are {_told(cast(Any, ray).available_resources())} of"
            f" {_told(cast(Any, ray).cluster_resources())}; ask for less, or add nodes"
        )

    def options(self, place: int) -> dict[str, Any]:
        """Options of an actor or task that goes there."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place
            )
        }

    def release(self) -> None:
        """Give them back; what runs there is ended."""
        remove_placement_group(self._group)

    def __enter__(self) -> Self:
        """They are reserved already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        self.release()


@dataclass(frozen=True, slots=True)
class Mark:
    """A file that shows whether another machine sees a folder of this one."""

    path: str
    text: str

    @classmethod
    def put(cls, folder: Path) -> "Mark":
        """Write one into a folder."""
        mark = cls(str(folder / "shared"), secrets.token_hex(8))
        Path(mark.path).write_text(mark.text)
        return mark

    def check(self, who: str) -> None:
        """Look for it where this is called.

        Raises:
            ClusterError: It is not there, or another one is.
        """
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not self._is_seen():
            if time.monotonic() > deadline:
                folder = Path(self.path).parent
                raise ClusterError(
                    f"{who} at {node_address()} does not see {str(folder)!r} of the run's machine,"
                    " through which weights and checkpoints go; set run.folder to a disk that all these"
                    " machines share under one path"
                )
            time.sleep(0.1)

    def _is_seen(self) -> bool:
        try:
            return Path(self.path).read_text() == self.text
        except OSError:
            return False


def _told(resources: Mapping[str, float]) -> str:
    hidden = ("node:", "memory", "object_store_memory")
    shown = [f"{amount:g} {name}" for name, amount in resources.items() if not name.startswith(hidden)]
    return ", ".join(shown) or "nothing"
