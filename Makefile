# Everything a user or CI runs. Each target sets up what it needs in .venv first.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
EXTRAS ?= dev
# A release of somebody else's must not break a clone: the versions that the tests passed with.
CONSTRAINTS ?= constraints.txt
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
PROTO  := proto/outrider/common/pb/outrider.proto
PROTOC := $(PY) -m grpc_tools.protoc -Iproto

.PHONY: help install lock demo test test-slow lint typecheck proto proto-check pair pair-bank bank-traces bench bench-main bench-engine bench-bank bench-pair bench-methods bench-controller bench-daemon bench-reliability bench-real bench-trees bench-heads bench-sources bench-gpu-paths bench-quantised bench-structured bench-library gpu-check house experiments experiments-quick pages install-service uninstall-service clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

install: $(STAMP) ## set up .venv for all of these; EXTRAS=ci has what few tests need too (triton, spaCy, Kubernetes)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV): packages of 2.2 GB, minutes the first time"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$(EXTRAS)]'
	@# pip would compile on one core, other people's tests too.
	$(PY) -m compileall -qq -j 0 -x '/tests?/' $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || true
	touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV): packages of 1.3 GB"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[edge,cloud]'
	touch $@

lock: $(STAMP) ## write constraints.txt from .venv, after make install CONSTRAINTS= EXTRAS=ci in a fresh one and the tests
	{ grep '^#' constraints.txt; $(PY) -m pip freeze --exclude-editable | grep -vE '^(torch|triton|pip|setuptools|nvidia-[^=]*)=='; } > constraints.new
	mv constraints.new constraints.txt

demo: $(DEMO_STAMP) ## start a verifier on loopback and decode with the embedded pair, four ways
	$(PY) -m outrider.experiments.demo $(ARGS)

WORKERS ?= 3
# A run starts a hundred processes: what the first compiled, the others read.
test test-slow: export PYTHONDONTWRITEBYTECODE =
# A worker that crashes fails the test that it was running, and is not replaced: its successor would run the test again,
# and may be given nothing to run without being told so, which never ends.
test: $(STAMP) ## the tests that CI runs, WORKERS=3 files at a time; 0 for one process
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10 $(ARGS)

test-slow: $(STAMP) ## the full matrices
	$(PY) -m pytest -m 'slow or not slow' --timeout 1800 $(ARGS)

lint: $(STAMP) ## what ruff says
	$(PY) -m ruff check .

typecheck: $(STAMP) ## what mypy says
	$(PY) -m mypy

proto: $(STAMP) ## regenerate common/pb from the .proto
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

proto-check: $(STAMP) ## fail when common/pb is out of date
	@dir=$$(mktemp -d) && trap "rm -rf $$dir" EXIT && \
	$(PROTOC) --python_out=$$dir --pyi_out=$$dir --grpc_python_out=$$dir $(PROTO) && \
	for f in outrider_pb2.py outrider_pb2.pyi outrider_pb2_grpc.py; do \
	  diff -q $$dir/outrider/common/pb/$$f common/pb/$$f >/dev/null || { echo "common/pb/$$f is out of date: run 'make proto'"; exit 1; }; \
	done && echo "common/pb is up to date"

pair: $(STAMP) ## train the embedded pair (ARGS="--help" lists the options)
	OMP_WAIT_POLICY=passive GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(PY) -m outrider.training.pair $(ARGS)

pair-bank: $(STAMP) ## pairs of other shapes and texts to judge the controller on, into training/runs/bank; ARGS="--only prose"
	OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(PY) -m outrider.training.bank $(ARGS)

bank-traces: $(STAMP) ## record experiments/shared/traces/bank-*.npz anew from what pair-bank built
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.controller.record_bank $(ARGS)

bench: bench-main bench-engine bench-methods bench-controller bench-pair bench-daemon ## the quicker benchmarks; bench-reliability, -real, -trees and -bank take an hour or more each

bench-main: $(STAMP) ## benchmarks/results/main.json; PROMPTS=FILE takes other prompts
	$(PY) -m benchmarks.main $(if $(PROMPTS),--prompts $(PROMPTS)) $(ARGS)

bench-engine: $(STAMP) ## benchmarks/results/engine.json; ARGS="--quick" or "--only stub_rounds,batch8"
	$(PY) -m benchmarks.engine.run $(ARGS)

bench-methods: $(STAMP) ## benchmarks/results/methods.json; PROMPTS=FILE takes other prompts
	$(PY) -m benchmarks.methods.run $(if $(PROMPTS),--prompts $(PROMPTS)) $(ARGS)

bench-controller: $(STAMP) ## benchmarks/results/controller.json; ARGS="--only depth", ways, guesses or shared
	$(PY) -m benchmarks.controller.run $(ARGS)

bench-bank: $(STAMP) ## benchmarks/results/controller_bank.json: constants fitted on some pairs of the bank, judged on the others
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.controller.fit $(ARGS)

bench-pair: $(STAMP) ## benchmarks/results/pair.json; PROMPTS=FILE measures other prompts beside the embedded ones
	$(PY) -m benchmarks.pair.run $(if $(PROMPTS),--prompts $(PROMPTS)) $(ARGS)

bench-daemon: $(STAMP) ## benchmarks/results/daemon.json: the daemon against edge-client run; ARGS=--quick
	$(PY) -m benchmarks.daemon $(ARGS)

bench-reliability: $(STAMP) ## benchmarks/results/reliability.json: faults, overload, hostile clients; ARGS=--long for the figures, "--only wire"
	$(PY) -m benchmarks.reliability.run $(ARGS)

bench-real: $(STAMP) ## benchmarks/results/real.json: start-up, memory, the demo, a round's cost, capacity, policies; ARGS="--only policies --points 8"
	$(PY) -m benchmarks.real.run $(ARGS)

bench-trees: $(STAMP) ## benchmarks/results/trees.json: what drafted trees bring; ARGS="--only draft"
	$(PY) -m benchmarks.trees.run $(ARGS)

bench-heads: $(STAMP) ## benchmarks/results/heads.json: heads and lookahead at the verifier; ARGS="--only rounds"
	$(PY) -m benchmarks.heads.run $(ARGS)

bench-sources: $(STAMP) ## benchmarks/results/sources.json: where drafts come from; ARGS="--only repeat"
	$(PY) -m benchmarks.sources.run $(ARGS)

bench-gpu-paths: $(STAMP) ## benchmarks/results/gpu_paths.json: the GPU's paths without a GPU; ARGS="--only kernel"
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.gpu_paths.run $(ARGS)

bench-quantised: $(STAMP) ## benchmarks/results/quantised.json: quantised targets, drafts and KV on a CPU; ARGS="--only torch_draft"
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.quantised.run $(ARGS)

bench-library: $(STAMP) ## benchmarks/results/library.json: SpeculativeDecoder, its examples and fields, the import; ARGS="--only overhead"
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.library.run $(ARGS)
bench-structured: $(STAMP) ## benchmarks/results/structured.json: texts that obey JSON schemas; ARGS="--only cost"
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.structured.run $(ARGS)

experiments-quick: $(STAMP) ## benchmarks/results/experiments.json: links, simulator, plan and a small matrix, in minutes
	$(PY) -m benchmarks.experiments --quick $(ARGS)

experiments: $(STAMP) ## the full matrix over seven round trips, for hours; ARGS=--resume goes on with it
	$(PY) -m benchmarks.experiments $(ARGS)

gpu-check: ## benchmarks/results/gpu_check.json: the verifier on this machine's GPU, in 560 s; ARGS=--rehearse needs none
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m benchmarks.gpu_check $(ARGS)

house: $(STAMP) ## benchmarks/results/house.json: how the code reads; ARGS=--list lists what is missing
	$(PY) -m benchmarks.house.run $(ARGS)

pages: $(STAMP) ## write docs/figures.md from benchmarks/results; ARGS=--check compares
	$(PY) -m benchmarks.pages $(ARGS)

SERVICE ?= verifier
install-service: ## SERVICE=verifier (as root) or edge, under systemd; deploy/systemd/README.md
	deploy/systemd/install.sh $(SERVICE)

uninstall-service: ## its undo; configuration and tokens stay
	deploy/systemd/uninstall.sh $(SERVICE)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
