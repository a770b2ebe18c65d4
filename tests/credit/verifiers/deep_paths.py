"""What nobody can read, root neither: paths that are longer than the system takes."""

import os
from pathlib import Path


def make_deep(folder: Path, *, is_folder: bool) -> None:
    """Put a file or a folder so deep that only a relative path to it is short enough: 4089 characters."""
    above = os.open(folder, os.O_RDONLY)
    for _ in range(15):
        os.mkdir("d" * 255, dir_fd=above)
        below = os.open("d" * 255, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    if is_folder:
        os.mkdir("x" * 249, dir_fd=above)
    else:
        os.close(os.open("x" * 249, os.O_CREAT | os.O_WRONLY, dir_fd=above))
    os.close(above)
