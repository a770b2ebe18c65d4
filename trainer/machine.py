"""What the machine has: processors, memory, disks. Linux's files, read and not interpreted.

Knows /proc and cgroups. Does not know spangrad or what is enough. What can't be read is None or empty.
"""

import os
import shutil
from pathlib import Path

GIB = 1024**3


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the first processor (`avx512f`, `avx512_bf16`, ...)."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_model() -> str | None:
    """Name of the first processor."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def usable_cores() -> float:
    """Cores that this process may use: affinity, cut by the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = "".join(_lines("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def memory_bytes() -> tuple[int, int] | None:
    """(total, available) bytes, cut by the container's limit."""
    known = _meminfo()
    if "MemTotal" not in known or "MemAvailable" not in known:
        return None
    total, available = known["MemTotal"], known["MemAvailable"]
    limit = "".join(_lines("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit() and int(limit) < total:
        used = "".join(_lines("/sys/fs/cgroup/memory.current")).strip()
        total = int(limit)
        available = min(available, total - int(used or 0))
    return total, available


def swap_used_bytes() -> int:
    """Bytes that are swapped out now."""
    known = _meminfo()
    return known.get("SwapTotal", 0) - known.get("SwapFree", 0)


def disk_bytes(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(total, free) bytes of the disk that holds a folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free


def load() -> float | None:
    """Average number of processes that wanted a core in the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _meminfo() -> dict[str, int]:
    known = {}
    for line in _lines("/proc/meminfo"):
        name, _, value = line.partition(":")
        amount = value.split()
        if amount:
            known[name] = int(amount[0]) * 1024
    return known


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
