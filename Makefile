# Every target sets up what it needs: .venv with torch, the package itself, doctest for the C++ tests.
#   make demo [ARGS="--steps 20 --link 1gbit"]    make test    make bench    make study    make lint    make docs    make wheels
PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
APT := $(if $(filter 0,$(shell id -u)),apt-get,sudo apt-get)
CMAKE := $(VENV)/bin/cmake
CXX_SOURCES := $(shell find include src python -type f) CMakeLists.txt
TEST_SOURCES := $(shell find tests/cpp tests/cuda_host bench/gpu_model -type f -not -name "*.py*")

.PHONY: FORCE demo test test-cpp test-python test-cuda-host test-ptx test-slow test-torch test-docs bench study gpu gpu-model lint docs install wheels clean

demo: install
	$(PY) examples/demo.py $(ARGS)

test: test-cpp test-python test-cuda-host

CODEC_FORMATS := int8:128,int4:128,int4:128:hadamard,int4:128:stochastic

bench: install
	rm -f bench/results/codec_*.jsonl
	$(PY) bench/codec.py --threads 1,2 --dtype all --isa all --format $(CODEC_FORMATS) --json bench/results/codec_ISA.jsonl
	$(PY) bench/collectives.py $(ARGS)

# What compression costs in loss. Runs that are in bench/results/study.jsonl are not repeated.
study: install
	$(PY) -m bench.convergence.run --docs docs/numerics.md $(ARGS)

# On a machine with a GPU: builds for it with nvcc and the torch that is there, tests, measures. Needs no network and
# less than ten minutes; ARGS="--only codec" runs a part. Not in .venv: it brings what it needs from $(PYTHON).
gpu:
	$(PYTHON) tools/run_gpu.py $(ARGS)

# What the collectives would take on GPUs, by a model: docs/performance.md.
gpu-model: build/plain/zcomm_tests
	build/plain/tests/cpp/zcomm_gpu_model

# --- Python ------------------------------------------------------------------------------------------------------

# NCCL's own declarations, which ours are compared with: of a release before the oldest that is served, and of a recent one.
NCCL_RELEASES := 2.18.3 2.30.7
NCCL_HEADERS := $(foreach release,$(NCCL_RELEASES),build/nccl/$(release)/include/nccl.h)
NCCL_HOME := $(subst $() $(),:,$(foreach release,$(NCCL_RELEASES),$(CURDIR)/build/nccl/$(release)))

test-python: install $(NCCL_HEADERS)
	NCCL_HOME=$(NCCL_HOME) $(PY) -m pytest -q -n 2 -m "not slow" $(ARGS)

build/nccl/%/include/nccl.h: $(VENV)/.ready
	rm -rf build/nccl/$* && mkdir -p build/nccl/$*
	$(PY) -m pip download -q --no-deps --only-binary :all: -d build/nccl/$* nvidia-nccl-cu12==$*
	$(PY) -m zipfile -e build/nccl/$*/*.whl build/nccl/$*/wheel
	mv build/nccl/$*/wheel/nvidia/nccl/include build/nccl/$*/ && rm -rf build/nccl/$*/wheel build/nccl/$*/*.whl

# The backend on GPU tensors, over a CUDA and an NCCL that live on the host.
test-cuda-host: install build/plain/zcomm_tests
	$(PY) -m pytest -q -n 2 tests/cuda_host/python $(ARGS)

test-slow: $(VENV)/.trainers $(NCCL_HEADERS)
	ZCOMM_REQUIRE_TRAINERS=1 NCCL_HOME=$(NCCL_HOME) $(PY) -m pytest -q -n 2 -m "slow or not slow" $(ARGS)

# The tests against another release of torch, in an environment of its own: make test-torch VERSION=2.15.0. Several GB.
TORCH_VENV := build/test-torch/$(VERSION)
test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m pytest -q -n 2 -m "not slow" $(ARGS)

$(TORCH_VENV)/.installed: $(TORCH_VENV)/.ready $(CXX_SOURCES) pyproject.toml
	$(TORCH_VENV)/bin/python -m pip install -q --no-build-isolation -e '.[test]' \
	  --config-settings=build-dir=build/test-torch/$(VERSION)-{wheel_tag}
	touch $@

$(TORCH_VENV)/.ready:
	@[ -n "$(VERSION)" ] || { echo 'expected a release of torch, e.g. make test-torch VERSION=2.15.0'; exit 1; }
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install -q torch==$(VERSION) 'scikit-build-core>=0.10' 'cmake>=3.25' ninja
	touch $@

# The packages of the extra "trainers", without building zcomm again.
$(VENV)/.trainers: $(VENV)/.installed
	$(PY) -m pip install -q $$($(PY) -c 'from importlib.metadata import requires; \
	  print(*(line.split(";")[0] for line in requires("zcomm") if "extra == \"trainers\"" in line))')
	touch $@

install: $(VENV)/.installed

# The packages of an extra that pyproject.toml has on one line.
TOOLS_OF = $(shell sed -n 's/^$(1) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',"')

$(VENV)/.installed: $(VENV)/.ready $(VENV)/.modules $(CXX_SOURCES) pyproject.toml
	$(PY) -m pip install -q --no-build-isolation -e '.[test,lint]'
	touch $@

# An editable install finds the modules that were there when it was made: it is made again when one comes or goes.
$(VENV)/.modules: $(VENV)/.ready FORCE
	@find zcomm -name '*.py' | sort | cmp -s - $@ || find zcomm -name '*.py' | sort >$@

FORCE:

define NEED_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'zcomm needs Python 3.10 or later'; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip, os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null \
  || { $(APT) update -qq && $(APT) install -y -qq python3-venv python3-dev; }
endef

NEED_COMPILER = @command -v g++ >/dev/null || { $(APT) update -qq && $(APT) install -y -qq g++; }

# A torch that the system has is used: it may be the one that fits its GPU.
$(VENV)/.ready:
	$(NEED_PYTHON)
	$(NEED_COMPILER)
	if $(PYTHON) -c 'import torch' 2>/dev/null; then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV) && $(PY) -m pip install -q torch==2.13.0; fi
	@# In a virtual environment it is not the system's: a path file leads there.
	@$(PY) -c 'import torch' 2>/dev/null \
	  || $(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
	  >"$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch_of_python.pth"
	$(PY) -m pip install -q 'scikit-build-core>=0.10' 'cmake>=3.25' ninja
	touch $@

# --- Releases -----------------------------------------------------------------------------------------------------

# In dist: a wheel for each Python from 3.10 to 3.13 that is here, with bindings for torch 2.11 to 2.15, and the sdist.
# ARGS="--python 3.11 --try 2.13.0" builds one and tries it with that torch; tools/wheels/build_wheels.py says more.
wheels:
	$(NEED_PYTHON)
	$(NEED_COMPILER)
	$(PYTHON) tools/wheels/build_wheels.py $(ARGS)

# --- The site -----------------------------------------------------------------------------------------------------

# In build/site; needs neither a build nor torch.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# Opens every page in a browser.
test-docs: docs
	@command -v chromium >/dev/null || { $(APT) update -qq && $(APT) install -y -qq chromium; }
	.venv-docs/bin/python -m pytest -q tests/site $(ARGS)

.venv-docs/.ready: pyproject.toml
	$(NEED_PYTHON)
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q $(call TOOLS_OF,docs)
	touch $@

# --- C++: the core alone, without torch ---------------------------------------------------------------------------

DOCTEST := $(if $(wildcard /usr/include/doctest/doctest.h),/usr/include,$(CURDIR)/build/doctest/usr/include)

$(DOCTEST)/doctest/doctest.h:
	mkdir -p build/doctest
	[ -n "$$(ls /var/lib/apt/lists/*Packages* 2>/dev/null)" ] || $(APT) update -qq
	cd build/doctest && apt-get download -qq doctest-dev && dpkg -x doctest-dev*.deb .

# Exhaustive cases of one thread each, which the thread sanitizer makes many minutes long.
ONE_THREAD := "differences: every*,differences: damaged*,messages and values*,every pattern*,tables that*,damaged messages*"

test-cpp: build/plain/zcomm_tests build/asan/zcomm_tests build/tsan/zcomm_tests
	build/plain/zcomm_tests
	build/asan/zcomm_tests & asan=$$!; build/tsan/zcomm_tests -tce=$(ONE_THREAD) && wait $$asan

build/%/zcomm_tests: $(VENV)/.ready $(DOCTEST)/doctest/doctest.h $(CXX_SOURCES) $(TEST_SOURCES)
	$(CMAKE) -G Ninja -S . -B build/$* -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DZCOMM_BUILD_TESTS=ON \
	  -DZCOMM_CUDA=OFF -DDOCTEST_INCLUDE_DIR=$(DOCTEST) -DZCOMM_SANITIZE=$(SANITIZE_$*) $(OPTIONS_$*) \
	  >build/$*.log || { cat build/$*.log; exit 1; }
	$(CMAKE) --build build/$* >build/$*.log || { cat build/$*.log; exit 1; }
	cp build/$*/tests/cpp/zcomm_tests $@

OPTIONS_plain := -DZCOMM_BUILD_TORCH_TESTS=ON -DPython_EXECUTABLE=$(CURDIR)/$(PY)
SANITIZE_asan := address,undefined
SANITIZE_tsan := thread

# The kernels as nvcc compiles them, executed on the host, for GPUs of compute capability 8.0, 9.0 and, in one way only,
# 10.0. Not part of `make test`, as it takes minutes.
NVCC := $(or $(CUDACXX),$(shell command -v nvcc))
PTX_TARGETS := 80 90
PTX_ONCE := 100
PTX := $(foreach target,$(PTX_TARGETS) $(PTX_ONCE),build/ptx/codec_$(target).ptx build/ptx/difference_$(target).ptx)

ifeq ($(NVCC),)
test-ptx:
	@echo 'skipped: make test-ptx executes what nvcc compiles, and there is no nvcc'
else
test-ptx: build/plain/zcomm_tests
	$(CMAKE) --build build/plain --target zcomm_ptx_tests >build/ptx.log || { cat build/ptx.log; exit 1; }
	$(MAKE) --no-print-directory -j 2 $(PTX)
	$(PY) tests/ptx/run.py build/plain/tests/ptx/zcomm_ptx_tests build/ptx $(PTX_TARGETS) --once $(PTX_ONCE)
endif

# The options of the kernels in src/CMakeLists.txt.
define COMPILE_PTX
	mkdir -p build/ptx
	$(NVCC) -ptx -std=c++20 -O3 -DNDEBUG -arch=compute_$* --diag-suppress=554 -Isrc -Iinclude $< -o $@
endef

build/ptx/codec_%.ptx: src/codec/cuda/codec_cuda.cu $(CXX_SOURCES)
	$(COMPILE_PTX)
build/ptx/difference_%.ptx: src/codec/cuda/difference_cuda.cu $(CXX_SOURCES)
	$(COMPILE_PTX)

# --- Style --------------------------------------------------------------------------------------------------------

# Needs neither a build nor torch: where there is no .venv yet, the tools have a small environment of their own.
LINT := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-lint)

$(LINT)/.lint: pyproject.toml
	$(NEED_PYTHON)
	@test -x $(LINT)/bin/python || $(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install -q $(call TOOLS_OF,lint)
	touch $@

lint: $(LINT)/.lint
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy
	$(LINT)/bin/clang-format --dry-run -Werror $(shell git ls-files '*.hpp' '*.cpp' '*.inl' '*.cu' '*.cuh')
	@# clang-tidy reads the commands of a build that is not carried out: the core, with a CUDA that lives on the host. Most
	@# of its time goes into headers, so it gets many sources as one. Kernels are the same files in every instruction set.
	$(NEED_COMPILER)
	$(LINT)/bin/cmake -S . -B build/tidy -DZCOMM_CUDA=OFF -DZCOMM_BUILD_TESTS=ON -DDOCTEST_INCLUDE_DIR=unused \
	  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=15 >/dev/null
	$(LINT)/bin/python $(LINT)/bin/run-clang-tidy.py -quiet -hide-progress -p build/tidy \
	  -clang-tidy-binary $(LINT)/bin/clang-tidy -header-filter '^$(CURDIR)/(include|src)/' \
	  'zcomm_core_on_host' '^$(CURDIR)/src/(?!.*_avx)'
	$(LINT)/bin/codespell zcomm tools src include python tests bench examples docs README.md CHANGELOG.md

clean:
	rm -rf build out $(VENV) .venv-lint .venv-docs
