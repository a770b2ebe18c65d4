"""A model folder's chat template, for calls that are text."""

from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import ConfigError

if TYPE_CHECKING:
    from spangrad.credit.pipeline import Render


def renderer(folder: Path) -> "Render":
    """What gives text-grade calls their token ids: the chat template of a model folder.

    Raises:
        ConfigError: The folder has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    from spangrad.trainer.learning.rendering import with_rendered_ids

    expected = "expected a model folder (Hugging Face format) with tokenizer and chat template"
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer is {str(folder)!r}, which is no folder; {expected}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"--tokenizer {str(folder)!r} can't be loaded: {first}; {expected}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"--tokenizer {str(folder)!r} has no chat template; {expected}")
    return lambda call: with_rendered_ids(call, tokenizer)
