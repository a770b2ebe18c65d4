"""The section `[serving]` of a run's config: where the policy is served, and how new weights get there.

Knows values and their ranges. Loads no torch and no HTTP.
"""

from dataclasses import dataclass
from typing import Literal

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import require

PauseMode = Literal["keep", "wait", "abort"]
TransferName = Literal["file", "lora"]


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Engines and gateway that serve the policy."""

    engine_url: str = "http://127.0.0.1:8000"
    """vLLM's own address, for weight updates, as the gateway has it."""
    engine_urls: tuple[str, ...] = ()
    """The addresses of several; then leave out `engine_url`. They are updated one after another, while the
    others serve."""
    transfer: TransferName = "file"
    """How new weights get into an engine. `file`: its workers read all weights from a file that they can
    reach. `lora`: it loads the adapter that is trained (`learner.lora_rank`) beside the starting model, under
    a name of its own for each version; nothing is paused, and a call has one version. The engine needs
    `spangrad serve --lora-rank`."""
    pause_mode: PauseMode = "keep"
    """What becomes of running calls while weights are replaced: `keep` freezes and continues them with the
    new weights, `wait` lets them end first (`publish_timeout_s` at most), `abort` cuts them."""
    publish_timeout_s: float = 120.0
    """Longest wait for one answer of an engine during a publish, seconds; more than 0."""
    gateway_url: str = "http://127.0.0.1:8100"
    """Address that agents call."""
    model: str = ""
    """Model folder that the run starts from (Hugging Face format)."""
    served_name: str = "policy"
    """Model name that agents ask for."""
    publish_tolerance: float = 0.02
    """Largest mean difference, in nats, between the served and the learner's logprobs after a publish;
    more than 0."""
    engine_wait_s: float = 180.0
    """How long a rollout worker waits for an engine, or for the server of `agent.url`, that went away; 0 or
    more."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "serving.")
        require(
            self.publish_tolerance > 0, "serving.publish_tolerance", self.publish_tolerance, "more than 0"
        )
        require(self.engine_wait_s >= 0, "serving.engine_wait_s", self.engine_wait_s, "0 or more")
        require(
            self.publish_timeout_s > 0, "serving.publish_timeout_s", self.publish_timeout_s, "more than 0"
        )
        if self.engine_urls and self.engine_url != ServingConfig.__dataclass_fields__["engine_url"].default:
            raise ConfigError(
                f"serving.engine_url is {self.engine_url!r} beside serving.engine_urls, which alone would"
                " count; leave out one of them"
            )
        require(
            len(set(self.engine_urls)) == len(self.engine_urls),
            "serving.engine_urls",
            self.engine_urls,
            "each address once",
        )

        if self.transfer == "lora" and self.pause_mode != "keep":
            raise ConfigError(
                f"serving.pause_mode = {self.pause_mode!r} has no effect with serving.transfer 'lora', which"
                " pauses nothing; leave it out"
            )

    @property
    def engines(self) -> tuple[str, ...]:
        """Addresses of all engines."""
        return self.engine_urls or (self.engine_url,)
