#!/usr/bin/env bash
# The tests of the CPU kernel with AddressSanitizer and UndefinedBehaviorSanitizer: bash scripts/sanitize.sh [pytest's arguments]
# Needs a .venv (make setup), CMake and GCC or Clang. What either finds ends the run.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build/sanitize
placed=src/headwise/backends/kernel.so # found before the installed one
trap 'rm -f "$placed"' EXIT
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_CXX_FLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" >"$build.log" 2>&1 ||
    { cat "$build.log"; exit 1; }
cmake --build "$build"
ln -sf "$PWD/$build/kernel.so" "$placed"
# the sanitizer has to be loaded before Python; Python's and torch's own leaks are not ours
LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "${PYTHON:-.venv/bin/python}" -m pytest tests/test_native.py tests/test_backends.py -m "not slow" -x -q --capture=sys "$@"
