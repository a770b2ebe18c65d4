"""Memory that ran out while a learner computed, as one error that says what needs less.

Knows torch's errors. Does not know what was computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from spangrad.errors import PolicyError

_OF_THE_CPU: Final = "can't allocate memory"
"""What torch's allocator of the CPU says in a plain RuntimeError."""


@contextmanager
def running_out_told() -> Iterator[None]:
    """Raise PolicyError where there is no memory left; other errors go on as they are."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        is_told = isinstance(error, torch.OutOfMemoryError | MemoryError) or _OF_THE_CPU in str(error)
        if not is_told:
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PolicyError(
            f"the learner ran out of memory ({first}); lower learner.max_tokens_per_microbatch, set"
            " learner.gradient_checkpointing = true, or train adapters (learner.lora_rank)"
        ) from error
