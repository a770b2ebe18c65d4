"""A tokenizer for a command: what it makes of calls, and what is said where ids of several models meet.

Knows a model folder, and the options that are about it. Loads transformers when a command gives one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spangrad.errors import ConfigError

if TYPE_CHECKING:
    from spangrad.adapters.model_call import ModelCall
    from spangrad.credit.rendered import Render

KEEPS_WITHOUT_RENDERING: Final = (
    "--keep-unknown-tools is about calls that are rendered: give --tokenizer MODEL_FOLDER with --clone or"
    " --min-grade text, too"
)


def renderer(folder: Path, *, clone: bool, keep_unknown_tools: bool = False) -> "Render":
    """What checks the token ids of calls and, to clone, gives text-grade calls theirs, out of a model folder.

    Raises:
        ConfigError: The folder has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    from spangrad.trainer.learning.rendering import with_rendered_ids
    from spangrad.trainer.learning.vocabulary import check_vocabulary

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

    def checked(call: "ModelCall") -> "ModelCall":
        check_vocabulary(call, tokenizer)
        return call

    def rendered(call: "ModelCall") -> "ModelCall":
        return with_rendered_ids(call, tokenizer, keep_unknown_tools=keep_unknown_tools)

    return rendered if clone else checked


def mixed_ids(models: Mapping[str, int], *, is_checked: bool) -> str | None:
    """What to say where rows hold token ids of several models (model -> rows); None where they do not."""
    if len(models) < 2:
        return None
    told = ", ".join(f"{name} in {count} rows" for name, count in sorted(models.items()))
    how = "each was checked against --tokenizer" if is_checked else "--tokenizer MODEL_FOLDER checks that"
    return f"warning: token ids of several models are mixed, right only in one vocabulary ({how}): {told}"
