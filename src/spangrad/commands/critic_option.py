"""The option `--checkpoint`: whose critic gives values of states to estimators that need some."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spangrad.commands.options import require
from spangrad.errors import ConfigError

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.critic import Critic

CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="Checkpoint of the run in --config, whose critic gives the values that gae and value_baseline"
        " need.",
    ),
]


def critic_of(
    checkpoint: Path | None, config: Path | None, credits: "Collection[CreditConfig]"
) -> "Critic | None":
    """The critic in a checkpoint of the run with this config; None: nobody asks for one.

    Raises:
        ConfigError: A checkpoint without a config, or one that nothing needs.
    """
    if checkpoint is None:
        return None
    if config is None:
        raise ConfigError(f"--checkpoint {str(checkpoint)!r} needs --config, which names the run's model")
    if not any(credit.needs_values for credit in credits):
        raise ConfigError(
            f"--checkpoint {str(checkpoint)!r} has no effect: no estimator here asks a critic; leave it out,"
            " or choose gae or value_baseline"
        )
    require("--checkpoint", "train")
    from spangrad.trainer.config import load_config
    from spangrad.trainer.stored_critic import stored_critic

    return stored_critic(load_config(config, besides=("warm_start",)), checkpoint)
