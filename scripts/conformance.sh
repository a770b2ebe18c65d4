#!/usr/bin/env bash
# The conformance suite with the oldest supported clients, the newest (those of .venv), or both:
#   scripts/conformance.sh oldest newest
#   scripts/conformance.sh update    # rewrite what is expected, with both; read the diff
set -euo pipefail
cd "$(dirname "$0")/.."
SUITE=tests/tracer/conformance
SUITE_MODULE=tests.tracer.conformance
PINS=$SUITE/versions/oldest.txt
OLDEST=.venv/conformance-oldest

# A venv with nothing but the pinned packages and pytest; spangrad itself comes from src/.
make_oldest() {
  local stamp
  stamp=$OLDEST/.made-$(cksum <"$PINS" | cut -d' ' -f1)
  [ -f "$stamp" ] && return
  echo "conformance: $(grep -c == "$PINS") pinned packages into $OLDEST (half a minute)"
  rm -rf "$OLDEST"
  .venv/bin/python -m venv --without-pip "$OLDEST"
  .venv/bin/python -m pip --disable-pip-version-check --python "$OLDEST/bin/python" install -q --no-deps --no-compile -r "$PINS"
  touch "$stamp"
}

run() { # run WITH MODULE ARGUMENTS
  local with=$1
  shift
  case $with in
    oldest) make_oldest && PYTHONPATH=src:. "$OLDEST/bin/python" -m "$@" ;;
    newest) .venv/bin/python -m "$@" ;;
    *) echo "conformance: $with? expected oldest, newest or update" >&2; exit 2 ;;
  esac
}

for what in "${@:-newest}"; do
  if [ "$what" = update ]; then
    for with in newest oldest; do run $with "$SUITE_MODULE.update"; done
    .venv/bin/python -m "$SUITE_MODULE.table"
  else
    # --confcutdir: the other tests' set-up needs packages that the oldest environment lacks
    run "$what" pytest -q --confcutdir=$SUITE -p no:cacheprovider "$SUITE"
  fi
done
