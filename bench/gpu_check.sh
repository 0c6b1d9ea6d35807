#!/bin/sh
# Does tokenmill work on this machine's GPU, and how fast? One table, at most 5 minutes, nothing is downloaded.
#
#     bench/gpu_check.sh [--cpu]
#
# Exit status 1 where a check fails. What cannot run here is a row "skipped" that says why. Without a GPU, or with --cpu, a
# reduced form runs on the CPU. PYTHON names the interpreter (default: .venv/bin/python if there, else python3). Wheels in
# .wheels/ are unpacked to a temporary folder first, for machines that lack a package and reach no index.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if ls .wheels/*.whl >/dev/null 2>&1; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$scratch/site" .wheels/*.whl
    PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TMPDIR="$scratch" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
timeout --kill-after=5 290 "$PYTHON" -m bench.gpu_check "$@"
