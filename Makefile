# Every target makes its own environment on first use: a folder .venv, installed from constraints.txt.
# Another interpreter: make demo PYTHON=python3.12   More for a tool: make test ARGS="-k verify -x"

PYTHON ?= python3
ARGS ?=

ifeq ($(OS),Windows_NT)
  BIN := .venv/Scripts
  PY := $(BIN)/python.exe
else
  BIN := .venv/bin
  PY := $(BIN)/python
endif
READY := .venv/ready

.DELETE_ON_ERROR:
.PHONY: help demo lab test notebooks exercises grade lint format links slides

help:
	@echo "make demo       see one text written twice: speculatively, and plainly"
	@echo "make lab        open the course in JupyterLab"
	@echo "make test       run every test and check every notebook"
	@echo "make notebooks  run the notebooks again and store their outputs"
	@echo "make exercises  make the exercises from the solutions; VARIANT=2027 makes a course folder with other numbers"
	@echo "make grade      grade a folder of submissions: make grade SUBMISSIONS=folder; VARIANT=2027 OUT=grades.csv if wanted"
	@echo "make lint       check style and types"
	@echo "make format     put the style right"
	@echo "make slides     make slides from the notebooks' stored outputs, in build/slides"
	@echo "make links      write the address and version into badges and set-up cells"

demo: $(READY)
	$(PY) -m specdec_lite.cli demo $(ARGS)

lab: $(READY)
	$(PY) -m jupyterlab $(ARGS) notebooks/00_start_here.ipynb

test: $(READY)
	$(PY) -m pytest $(ARGS)

notebooks: $(READY)
	$(PY) tools/notebooks.py $(ARGS)

# With a VARIANT: a folder for nbgrader. Without: exercises/, and the page that lists the wrong answers.
exercises: $(READY)
ifdef VARIANT
	$(PY) tools/exercises.py --variant $(VARIANT)
else
	$(PY) tools/exercises.py
	$(PY) tools/wrong_answers.py
endif

grade: $(READY)
	$(PY) tools/grade.py $(if $(SUBMISSIONS),"$(SUBMISSIONS)") $(if $(VARIANT),--variant $(VARIANT)) $(if $(OUT),--out "$(OUT)")

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

slides: $(READY)
	$(PY) tools/slides.py

links: $(READY)
	$(PY) tools/links.py $(ARGS)

# The file `ready` is made last, so an interrupted installation starts again; changed requirements are newer than it.
$(READY): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(PY) -c "open('$(READY)', 'w').close()"

$(PY):
	@$(PYTHON) -c "import sys; v = sys.version_info; v < (3, 10) and sys.exit('Python 3.10 or newer is needed, and $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12' % v[:2])"
	$(PYTHON) -m venv .venv
