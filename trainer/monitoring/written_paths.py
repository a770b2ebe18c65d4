"""Which files a tool call writes to, as far as its arguments say.

Knows names of editing tools, patches, shell commands and a little Python. Does not know which files matter.
It reads what agents commonly write, and is no proof of anything: a program that a call starts may write what
it likes. Nothing here is trusted or run; work grows with the length of the text, of which `LONGEST`
characters are looked at.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

LONGEST: Final = 100_000
_LONGEST_PATH: Final = 500
_EDITS: Final = re.compile(
    r"(?<![a-z])(append|apply|create|delete|edit|insert|modify|move|overwrite|patch|remove|rename|replace|save|update"
    r"|write)(?![a-z])"
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PATH_KEY: Final = re.compile(r"path|file|target|destination|uri", re.IGNORECASE)
_CONTENT_KEY: Final = re.compile(r"text|content|source_code|str$|string", re.IGNORECASE)
_PATCHED: Final = re.compile(
    r"^(?:\+\+\+ (?:b/)?|\*\*\* (?:Add|Update|Delete) File: |\*\*\* Move to: |rename to )(\S.*)$",
    re.MULTILINE,
)
_REDIRECTED: Final = re.compile(
    r"""(?<![-=<>&0-9])>{1,2}\|?(?!=)[ \t]{0,9}"""
    r"""(?:'([^'\n]{1,500})'|"([^"\n]{1,500})"|([^\s;&|<>()'"`]{1,500}))"""
)
_PYTHON: Final = re.compile(
    r"""open\(\s{0,9}['"]([^'"\n]{1,500})['"]\s{0,9},\s{0,9}(?:mode\s{0,9}=\s{0,9})?['"][rbt]{0,2}[wax+]"""
    r"""|Path\(\s{0,9}['"]([^'"\n]{1,500})['"]\s{0,9}\)\s{0,9}\."""
    r"""\s{0,9}(?:write_|unlink|rename|replace|touch)"""
    r"""|(?:os\.(?:remove|unlink|rename|replace)|shutil\.(?:copy\w{0,9}|move))"""
    r"""\([^)\n]{0,500}?['"]([^'"\n]{1,500})['"]\s{0,9}\)"""
)
"""Every repetition has an end, so that no text takes longer than its length."""
_COMMANDS: Final = re.compile(r"[;\n|&]+")
_BEFORE: Final = frozenset({"sudo", "then", "do", "else", "$"})
_EVERY_ARGUMENT: Final = frozenset({"rm", "touch", "truncate", "tee", "unlink", "mv", "shred"})
_LAST_ARGUMENT: Final = frozenset({"cp", "ln", "install", "rsync"})
_IN_PLACE: Final = frozenset({"sed", "perl", "ruby"})
_GIT: Final = frozenset({"checkout", "restore", "rm", "mv"})


def written_paths(name: str, arguments: Any) -> set[str]:
    """Paths that a call of a tool writes to, deletes or moves.

    Args:
        name: Name of the tool.
        arguments: Decoded arguments; text is a command or code.
    """
    told = arguments if isinstance(arguments, Mapping) else {"command": arguments}
    command = told.get("command")
    words = _CAMEL.sub("_", name).lower()
    does_edit = _EDITS.search(words) is not None
    if isinstance(command, str) and command.isidentifier():  # an editor with commands: create, view, ...
        does_edit = _EDITS.search(command.lower()) is not None
    found: set[str] = set()
    for key, value in told.items():
        for text in [value] if isinstance(value, str) else value if isinstance(value, list) else ():
            if not isinstance(text, str):
                continue
            is_content = does_edit and _CONTENT_KEY.search(str(key)) is not None
            if does_edit and not is_content and _PATH_KEY.search(str(key)) and "\n" not in text:
                found.add(text)
            elif not is_content:
                found |= paths_in_code(text)
            found |= {path for path in _PATCHED.findall(text[:LONGEST]) if does_edit}
    return {path for path in found if len(path) <= _LONGEST_PATH}


def paths_in_code(text: str) -> set[str]:
    """Paths that shell commands, patches in them, or Python code write to."""
    text = text[:LONGEST]
    found = {
        next(filter(None, groups)) for pattern in (_REDIRECTED, _PYTHON) for groups in pattern.findall(text)
    }
    for command in _COMMANDS.split(text):
        found |= set(_arguments_written(command.split()))
    if "patch" in text or "git apply" in text:
        found |= set(_PATCHED.findall(text))
    return {path for path in found if len(path) <= _LONGEST_PATH and path != "/dev/null"}


def _arguments_written(words: list[str]) -> Iterator[str]:
    first = next((n for n, word in enumerate(words) if word not in _BEFORE and "=" not in word), len(words))
    if not (words := words[first:]):
        return
    program, options = words[0].rpartition("/")[2], [word for word in words[1:] if word.startswith("-")]
    plain = [word.strip("'\"") for word in words[1:] if not word.startswith("-")]
    in_place = program in _IN_PLACE and any(
        option.startswith(("-i", "--in-place", "-pi")) for option in options
    )
    if program in _EVERY_ARGUMENT or in_place or (program == "git" and plain and plain[0] in _GIT):
        yield from plain
    elif program in _LAST_ARGUMENT:
        yield from plain[-1:]
