# Short names for scripts/dev.py, which does the work and needs nothing but Python. `make` alone lists them.

PYTHON ?= $(shell command -v python3 || command -v python)
DEV = "$(PYTHON)" scripts/dev.py

# TEXT may hold anything: quotes, dollars, backticks, $(shell …), newlines. Make would expand a variable of its
# command line, so freeze the literal text; it travels by the environment, and no recipe ever mentions it.
override TEXT := $(value TEXT)
export TEXT
# Command-line variables stay out of MAKEFLAGS too, where a make started by a recipe would expand them.
MAKEOVERRIDES :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup look test test-all check docs clean

help:
	@$(DEV) --help

setup look test test-all check docs clean:
	@$(DEV) $@
