#!/usr/bin/env bash
# What a machine with a CUDA device can tell: the contract suites there, and the benchmarks against torch's kernels.
# Needs no network and no installation, from any folder:
#     bash scripts/gpu.sh [--out FOLDER] [--minutes N] [--reduced]
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$root/scripts/gpu.py" "$@"
