# Needs Python 3.11 or newer, make and pip. Everything else goes into .venv; delete .venv to start afresh.

PYTHON ?= python3
ARGS ?=

python := .venv/bin/python
pip_install := $(python) -m pip --disable-pip-version-check --quiet install
# What an installation follows from: where the checkout lies (an editable install holds its path) and pyproject.toml.
wanted = "$$(pwd; cat pyproject.toml)"
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help pretrain test check install install-dev venv

help:  ## list the targets
	@echo "make TARGET [ARGS='...'] [PYTHON=/path/to/python3]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1: /p' Makefile

pretrain: install  ## train a small language model on text that ships with the package, about five minutes
	@$(python) examples/llm/pretrain.py +conf=llm/quickstart $(ARGS)

test: install-dev  ## run the tests; ARGS go to pytest
	@$(python) -m pytest $(ARGS)

check: install-dev  ## lint, format, types, floors
	@tools/check

install: venv  ## put what training needs into .venv
	@[ $(wanted) = "$$(cat .venv/installed 2>/dev/null)" ] || { \
	  echo "installing nemo-like into .venv, about 2-3 minutes the first time ..." \
	  && $(pip_install) --editable . \
	  && printf '%s\n' $(wanted) > .venv/installed; \
	}

install-dev: venv  ## put what the tests need into .venv, too
	@[ $(wanted) = "$$(cat .venv/installed-dev 2>/dev/null)" ] || { \
	  echo "installing nemo-like and what its tests need into .venv, about 2-3 minutes the first time ..." \
	  && $(pip_install) --editable '.[dev]' \
	  && printf '%s\n' $(wanted) > .venv/installed-dev \
	  && cp .venv/installed-dev .venv/installed; \
	}

# Where Python has no ensurepip (Debian without python3-venv), its own pip fills the environment.
venv:
	@$(python) -c 'import pip' 2>/dev/null || { \
	  "$(PYTHON)" -c '' || { \
	    echo "'$(PYTHON)' does not run: install Python 3.11 or newer, or name one: make ... PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  }; \
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1), and 3.11 or newer is needed: make ... PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  }; \
	  "$(PYTHON)" -m venv --clear .venv >/dev/null 2>&1 || { \
	    "$(PYTHON)" -m venv --clear --without-pip .venv \
	    && "$(PYTHON)" -m pip --python $(python) --disable-pip-version-check --quiet install pip; \
	  } || { \
	    echo "no environment could be made in .venv: '$(PYTHON)' needs venv and ensurepip, or pip 22.3 or newer" >&2; \
	    exit 1; \
	  }; \
	}
