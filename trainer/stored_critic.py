"""The critic in a checkpoint, for commands that credit what is stored as a run did.

Knows configs, checkpoints and learners. Does not know: stores, commands.
"""

from dataclasses import replace
from pathlib import Path

from spangrad.credit.critic import Critic
from spangrad.errors import ConfigError
from spangrad.trainer.config import TrainConfig, resolve
from spangrad.trainer.learning.checkpoint import load_counters
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import CriticConfig


def stored_critic(config: TrainConfig, checkpoint: Path) -> Critic:
    """What the critic in a checkpoint of a run expects, on the hidden states of the policy beside it.

    The advantages of update k were made with the checkpoint of the update before it.

    Raises:
        ConfigError: The checkpoint has no critic. StoreError: It can't be read. PolicyError: It is of another
            model than the config's.
    """
    if "critic_updates" not in load_counters(checkpoint):
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} has no critic; a run has one if its credit needs values"
        )
    model = resolve(config.learner.model_path or config.serving.model, config.base_dir)
    settings = config.learner_from(model)
    learner = Learner(replace(settings, critic=settings.critic or CriticConfig()))
    learner.load(checkpoint)
    return learner.values
