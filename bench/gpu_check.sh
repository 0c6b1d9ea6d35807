#!/bin/sh
# Checks that tokenmill works on the GPU of this machine, and how fast: one table, at most 6 minutes, no downloads.
#
#     bench/gpu_check.sh [--cpu] [--json FILE] [--rows 1,3,10]
#
# Exit status 1 if a check fails. A check that cannot run here is a row "skipped" with the reason. Without a GPU, or with
# --cpu, a reduced form runs on the CPU. PYTHON names the interpreter (default: .venv/bin/python if it exists, else
# python3). Wheels in .wheels/ are unpacked to a temporary folder, for machines without a package and without an index.
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
seconds=355
case " $* " in *" --cpu "*) seconds=2700 ;; esac    # interpreted kernels are slow
timeout --kill-after=4 "$seconds" "$PYTHON" -m bench.gpu_check "$@"
