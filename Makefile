# Every target sets up what it needs: .venv with torch, the package itself, doctest for the C++ tests. `make help` lists
# those that have a text after "##".
PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
APT := $(if $(filter 0,$(shell id -u)),apt-get,sudo apt-get)
CMAKE := $(VENV)/bin/cmake
# Two workers more than cores, as tests wait now and then: for a limited link, or for a time-out.
PYTEST := -m pytest -q -n $(shell cores=$$(nproc); echo $$((cores < 7 ? cores + 2 : 8)))
CXX_SOURCES := $(shell find include src python -type f) CMakeLists.txt
TEST_SOURCES := $(shell find tests/cpp tests/cuda_host tests/ptx -type f -not -name "*.py*")

.PHONY: FORCE help demo check test test-python test-cuda-host test-sanitize test-asan test-tsan test-aarch64 \
  .need-aarch64 test-ptx test-jobs test-slow test-torch test-torch-suite test-docs bench tables study gpu gpu-rehearsal \
  gpu-model lint format coverage docs install wheels wheels-aarch64 \
  release-check clean

demo: install  ## train GPT over a limited link, with Gloo and with zcomm
	$(PY) examples/demo.py $(ARGS)

help:  ## list the targets
	@sed -nE 's/^([a-z0-9-]+):.*  ## (.*)/\1|\2/p' $(MAKEFILE_LIST) | sort | awk -F '|' '{printf "make %-18s %s\n", $$1, $$2}'

test: check test-python test-cuda-host  ## run what to run before you send a change: 8 minutes on two cores

# A target is as old as the beginning of its build: sources that are edited meanwhile are newer.
BEGIN = @touch $@.begun
END = @touch -r $@.begun $@ && rm $@.begun

OTHER_FORMATS := int4:128,int4:128:stochastic,eden2:128

ISAS ?= avx512,avx2
TRAINING_STEP := bench/training_step.py --out bench/results

# All that docs/performance.md has of a CPU, and its tables: an hour or so, with nothing else running, of committed code.
bench: install  ## measure what docs/performance.md has of CPUs: an hour
	$(PY) bench/codec.py --threads 1,2 --dtype all --isa $(ISAS) --out bench/results
	$(PY) bench/codec.py --dtype all --isa $(ISAS) --format $(OTHER_FORMATS) --kept-as other_formats --out bench/results
	$(PY) bench/collectives.py
	$(PY) $(TRAINING_STEP) --turns 60
	$(PY) $(TRAINING_STEP) --turns 60 --rate 100mbit
	$(PY) $(TRAINING_STEP) --rate 100mbit --learning-rate 3e-5
	$(PY) bench/example_runs.py
	$(PY) bench/sampling_cost.py --out bench/results
	$(PY) -m bench.tables

# The tables of docs/performance.md, docs/prove.md and docs/numerics.md, from bench/results.
tables: .venv-docs/.ready
	.venv-docs/bin/python -m bench.tables

# What compression costs in loss. Runs that are in bench/results/study.jsonl are not repeated.
study: install  ## measure what compression costs in loss: hours
	$(PY) -m bench.convergence.run --docs docs/numerics.md $(ARGS)

# On a machine with a GPU: builds for it with nvcc and the torch that is there, tests, measures. Needs no network and
# half an hour; ARGS="--part 1" runs a third, ARGS="--only codec" a stage. Parts 4 and 5 are for several GPUs. Not in
# .venv: it brings what it needs from $(PYTHON).
gpu:  ## build, test and measure on a machine with a GPU: half an hour
	$(PYTHON) tools/run_gpu.py $(ARGS)

# Its stages that measure what the planner assumes, with tiny sizes, on the stand-in for a GPU.
gpu-rehearsal: build/plain/cuda_host/.torch install  ## run what a stand-in for a GPU can run of `make gpu`
	$(PY) tools/run_gpu.py --rehearse $(ARGS)

# What the collectives would take on GPUs, by a model: docs/performance.md.
gpu-model: install
	$(PY) bench/gpu_model.py

# --- Python ------------------------------------------------------------------------------------------------------

# NCCL's own declarations, which ours are compared with: of a release before the oldest that is served, and of the
# newest one that is known.
NCCL_RELEASES := 2.18.3 2.32.3
NCCL_HEADERS := $(foreach release,$(NCCL_RELEASES),build/nccl/$(release)/include/nccl.h)
NCCL_HOME := $(subst $() $(),:,$(foreach release,$(NCCL_RELEASES),$(CURDIR)/build/nccl/$(release)))

test-python: install $(NCCL_HEADERS)  ## run the tests in Python, but for those of whole jobs
	NCCL_HOME=$(NCCL_HOME) $(PY) $(PYTEST) -m "not slow and not job" $(ARGS)

# The tests in Python that launch or compile whole jobs: a third of the time of all.
test-jobs: build/plain/cuda_host/.torch install  ## run the tests that launch or compile whole jobs: 6 minutes
	$(PY) $(PYTEST) -m "job and not slow" $(ARGS)
	TESTS_GPU_DEVICE=stand-in $(PY) $(PYTEST) tests/gpu -m job $(ARGS)

build/nccl/%/include/nccl.h: $(VENV)/.tools
	rm -rf build/nccl/$* && mkdir -p build/nccl/$*
	$(PY) -m pip download -q --no-deps --only-binary :all: -d build/nccl/$* nvidia-nccl-cu12==$*
	$(PY) -m zipfile -e build/nccl/$*/*.whl build/nccl/$*/wheel
	nm -D --defined-only build/nccl/$*/wheel/nvidia/nccl/lib/libnccl.so.2 >build/nccl/$*/symbols
	mv build/nccl/$*/wheel/nvidia/nccl/include build/nccl/$*/ && rm -rf build/nccl/$*/wheel build/nccl/$*/*.whl

# The GPU side over a CUDA and an NCCL that live on the host: in C++, and the backend on GPU tensors. Side by side, as both
# wait for time-outs half of their time.
test-cuda-host: build/plain/zcomm_cuda_host_tests build/plain/zcomm_front_tests build/plain/cuda_host/.torch install  ## run the tests of the GPU side on the host: 3 minutes
	build/plain/zcomm_front_tests
	$(PY) $(PYTEST) tests/python/codec/test_nccl_front.py tests/python/codec/test_nccl_programs.py
	build/plain/zcomm_cuda_host_tests & cpp=$$!; TESTS_GPU_DEVICE=stand-in $(PY) $(PYTEST) tests/gpu -m "not job" $(ARGS); \
	  python=$$?; wait $$cpp && exit $$python

# Megatron's own modules, as sources: its wheels are for other releases of Python, and bring what no CPU can run.
MEGATRON := build/megatron
$(MEGATRON)/.unpacked: $(VENV)/.tools
	rm -rf $(MEGATRON) && mkdir -p $(MEGATRON)
	$(PY) -m pip download -q --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_24_x86_64 \
	  -d $(MEGATRON) megatron-core==0.19.2 megatron-fsdp==0.6.1
	for wheel in $(MEGATRON)/*.whl; do $(PY) -m zipfile -e $$wheel $(MEGATRON); done && rm $(MEGATRON)/*.whl
	touch $@

test-slow: $(VENV)/.trainers $(NCCL_HEADERS) $(MEGATRON)/.unpacked  ## run all tests in Python, with the trainers that zcomm supports
	TESTS_REQUIRE_TRAINERS=1 TESTS_MEGATRON=$(CURDIR)/$(MEGATRON) NCCL_HOME=$(NCCL_HOME) $(PY) $(PYTEST) -m "slow or not slow" $(ARGS)

# torch's own suites with zcomm in gloo's place. test-slow runs them, too.
test-torch-suite: install  ## run torch's own suites with zcomm in Gloo's place: 10 minutes
	$(PY) $(PYTEST) -m "slow or not slow" tests/python/backend/test_torch_suite.py $(ARGS)

# The tests against another release of torch, in an environment of its own: make test-torch VERSION=2.15.0. Several GB.
TORCH_VENV := build/test-torch/$(VERSION)
test-torch: $(TORCH_VENV)/.installed  ## run the tests with another torch: make test-torch VERSION=2.15.0
	$(TORCH_VENV)/bin/python $(PYTEST) -m "not slow" $(ARGS)

$(TORCH_VENV)/.installed: $(TORCH_VENV)/.ready $(CXX_SOURCES) pyproject.toml
	$(BEGIN)
	$(TORCH_VENV)/bin/python -m pip install -q --no-build-isolation -e '.[test]' -e ./bench \
	  --config-settings=build-dir=build/test-torch/$(VERSION)-{wheel_tag}
	$(END)

$(TORCH_VENV)/.ready:
	@[ -n "$(VERSION)" ] || { echo 'expected a release of torch, e.g. make test-torch VERSION=2.15.0'; exit 1; }
	$(PYTHON) -m venv $(TORCH_VENV)
	$(call INSTALL_TORCH,$(TORCH_VENV)/bin/python,$(VERSION))
	$(TORCH_VENV)/bin/python -m pip install -q 'scikit-build-core>=0.10' 'cmake>=3.25' ninja
	touch $@

# The packages of the extra "trainers", without building zcomm again.
$(VENV)/.trainers: $(VENV)/.installed
	$(PY) -m pip install -q $$($(PY) -c 'from importlib.metadata import requires; \
	  print(*(line.split(";")[0] for line in requires("zcomm-collectives") if "extra == \"trainers\"" in line))')
	touch $@

install: $(VENV)/.installed  ## set up .venv with torch, the tools and zcomm, editable

# The packages of an extra that pyproject.toml has on one line.
TOOLS_OF = $(shell sed -n 's/^$(1) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',')

$(VENV)/.installed: $(VENV)/.ready $(VENV)/.modules $(CXX_SOURCES) pyproject.toml
	$(BEGIN)
	$(PY) -m pip install -q --no-build-isolation -e '.[test,lint]' -e ./bench
	$(END)

# An editable install finds the modules that were there when it was made: it is made again when one comes or goes.
$(VENV)/.modules: $(VENV)/.ready FORCE
	@find zcomm bench/zcomm_bench -name '*.py' | sort | cmp -s - $@ || find zcomm bench/zcomm_bench -name '*.py' | sort >$@

FORCE:

define NEED_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'zcomm needs Python 3.10 or later'; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip, os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null \
  || { $(APT) update -qq && $(APT) install -y -qq python3-venv python3-dev; }
endef

NEED_COMPILER = @command -v g++ >/dev/null || { $(APT) update -qq && $(APT) install -y -qq g++; }

# What the core's C++ needs beside a compiler. A torch that the system has is used: it may be the one that fits its GPU.
$(VENV)/.tools:
	$(NEED_PYTHON)
	$(NEED_COMPILER)
	@$(PYTHON) -m venv $(VENV) $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages)
	$(PY) -m pip install -q --ignore-installed 'cmake>=3.25' ninja
	touch $@

# $(1): a Python, $(2): a release of torch. Without a GPU it is the build for CPUs, as the other one brings gigabytes of
# CUDA; where that cannot be reached, or has no such release, it is what the configured index has.
define INSTALL_TORCH
{ test ! -e /dev/nvidia0 && $(1) -m pip install -q --retries 1 --timeout 20 torch==$(2)+cpu \
  --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null; } || $(1) -m pip install -q torch==$(2)
endef

# What torch and the package need. Where the system's torch is in a virtual environment, a path file leads there.
$(VENV)/.ready: $(VENV)/.tools
	@$(PY) -c 'import torch' 2>/dev/null \
	  || $(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null \
	  >"$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch_of_python.pth" \
	  || $(call INSTALL_TORCH,$(PY),2.13.0)
	$(PY) -m pip install -q 'scikit-build-core>=0.10'
	touch $@

# --- Releases -----------------------------------------------------------------------------------------------------

# In dist: a wheel for each Python from 3.10 to 3.15 that is here, with bindings for torch 2.11 to 2.15, and the sdist.
# ARGS="--python 3.11 --try 2.13.0" builds one and tries it with that torch; tools/wheels/build_wheels.py says more.
wheels:  ## build and try a wheel for each Python on this machine
	$(NEED_PYTHON)
	$(NEED_COMPILER)
	$(PYTHON) tools/wheels/build_wheels.py $(ARGS)

# The same for aarch64, by a cross compiler: without the GPU side, and not tried.
wheels-aarch64: .need-aarch64
	$(MAKE) --no-print-directory wheels ARGS="--machine aarch64 $(ARGS)"

# All of a release that needs no account, with a wheel for $(PYTHON). ARGS is that of `make wheels`.
release-check:  ## build and try what a release uploads, and check it as PyPI would
	$(NEED_PYTHON)
	$(NEED_COMPILER)
	$(PYTHON) tools/wheels/release_check.py $(ARGS)

# --- The site -----------------------------------------------------------------------------------------------------

# In build/site, with pictures drawn from bench/results; needs neither a build nor torch.
docs: tables  ## build the site, in build/site
	.venv-docs/bin/python -m bench.pictures
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# Opens every page in a browser.
test-docs: docs  ## open every page of the site in a browser
	@command -v chromium >/dev/null || { $(APT) update -qq && $(APT) install -y -qq chromium; }
	.venv-docs/bin/python -m pytest -q tests/site $(ARGS)

.venv-docs/.ready: pyproject.toml
	$(NEED_PYTHON)
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q $(call TOOLS_OF,docs)
	touch $@

# --- C++ ----------------------------------------------------------------------------------------------------------

# The core alone, without torch.
check: build/plain/zcomm_tests  ## build and test the C++ core alone, without torch: 2 minutes
	build/plain/zcomm_tests

DOCTEST := $(if $(wildcard /usr/include/doctest/doctest.h),/usr/include,$(CURDIR)/build/doctest/usr/include)

$(DOCTEST)/doctest/doctest.h:
	mkdir -p build/doctest
	[ -n "$$(ls /var/lib/apt/lists/*Packages* 2>/dev/null)" ] || $(APT) update -qq
	cd build/doctest && apt-get download -qq doctest-dev && dpkg -x doctest-dev*.deb .

# Exhaustive cases of one thread each, which the thread sanitizer makes many minutes long.
ONE_THREAD := "lossless: every*,lossless: damaged*,messages and values*,every pattern*,tables that*,damaged messages*"

test-sanitize: $(foreach kind,asan tsan,$(foreach name,tests cuda_host_tests front_tests,build/$(kind)/zcomm_$(name)))  ## run the C++ tests under the address and thread sanitizers
	$(MAKE) --no-print-directory --output-sync -j 2 test-asan test-tsan

test-asan: build/asan/zcomm_tests build/asan/zcomm_cuda_host_tests build/asan/zcomm_front_tests
	build/asan/zcomm_front_tests
	build/asan/zcomm_tests
	build/asan/zcomm_cuda_host_tests

test-tsan: build/tsan/zcomm_tests build/tsan/zcomm_cuda_host_tests build/tsan/zcomm_front_tests
	build/tsan/zcomm_front_tests
	build/tsan/zcomm_tests -tce=$(ONE_THREAD)
	build/tsan/zcomm_cuda_host_tests -tce=$(ONE_THREAD)

# Of the core by its C++ tests, of the Python by all tests but those of whole jobs.
coverage: $(VENV)/.coverage build/coverage/zcomm_tests $(NCCL_HEADERS)  ## print how much of the product the tests run
	find build/coverage -name '*.gcda' -delete
	build/coverage/zcomm_tests
	$(PY) -m gcovr -r . -f src -f include -e '.*/cuda/.*' --gcov-ignore-errors all -s -o build/coverage/report.txt build/coverage
	rm -f build/coverage/python*
	NCCL_HOME=$(NCCL_HOME) $(PY) -m coverage run $(PYTEST) -m "not slow and not job" $(ARGS)
	$(PY) -m coverage combine -q && $(PY) -m coverage report --sort=cover --skip-covered

CONFIGURE_coverage := -DCMAKE_CXX_FLAGS="--coverage -fprofile-update=atomic"

$(VENV)/.coverage: $(VENV)/.installed
	$(PY) -m pip install -q $(call TOOLS_OF,coverage)
	touch $@

# The core on the hosts of GH200 and GB200, in an emulator, which cannot run a program that a program starts.
test-aarch64: build/aarch64/zcomm_tests  ## run the C++ tests for aarch64 in an emulator: 3 minutes
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/zcomm_tests -tce="a forked child*"

.need-aarch64:
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null \
	  || { $(APT) update -qq && $(APT) install -y -qq g++-aarch64-linux-gnu qemu-user; }

build/aarch64/build.ninja: | .need-aarch64

CONFIGURE_aarch64 := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++

SANITIZE_asan := address,undefined
SANITIZE_tsan := thread

# In a build of one kind: plain, asan or tsan. $(1): what is to be built.
BUILD_TARGET = $(CMAKE) --build build/$* --target $(1) >build/$*.log || { cat build/$*.log; exit 1; }
CONFIGURE = $(CMAKE) -S . -B build/$* $(1) >build/$*.log || { cat build/$*.log; exit 1; }

build/%/build.ninja: $(VENV)/.tools $(DOCTEST)/doctest/doctest.h
	mkdir -p build
	$(call CONFIGURE,-G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DZCOMM_BUILD_TESTS=ON -DZCOMM_CUDA=OFF \
	  -DDOCTEST_INCLUDE_DIR=$(DOCTEST) -DZCOMM_SANITIZE=$(SANITIZE_$*) $(CONFIGURE_$*))

.PRECIOUS: build/%/build.ninja

PROGRAMS := cpp/zcomm_tests cpp/zcomm_cuda_host_tests cpp/zcomm_front_tests ptx/zcomm_ptx_tests
define PROGRAM
build/%/$(notdir $(1)): build/%/build.ninja $(CXX_SOURCES) $(TEST_SOURCES)
	$$(BEGIN)
	$$(call BUILD_TARGET,$(notdir $(1)))
	cp build/$$*/tests/$(1) $$@
	$$(END)
endef
$(foreach program,$(PROGRAMS),$(eval $(call PROGRAM,$(program))))

# A "CUDA" for the torch of .venv.
build/%/cuda_host/.torch: $(VENV)/.ready build/%/build.ninja $(CXX_SOURCES) $(TEST_SOURCES)
	$(BEGIN)
	$(call CONFIGURE,-DZCOMM_BUILD_TORCH_TESTS=ON -DPython_EXECUTABLE=$(CURDIR)/$(PY))
	$(call BUILD_TARGET,nccl_on_host zcomm_nccl_on_host cuda_host_torch)
	$(END)

# The kernels as nvcc compiles them, executed on the host, for GPUs of compute capability 8.0, 9.0 and, in one way only,
# 10.0. Not part of `make test`, as it takes minutes.
NVCC := $(or $(CUDACXX),$(shell command -v nvcc))
PTX_TARGETS := 80 90
PTX_ONCE := 100
PTX := $(foreach target,$(PTX_TARGETS) $(PTX_ONCE),build/ptx/codec_$(target).ptx build/ptx/lossless_$(target).ptx)

ifeq ($(NVCC),)
test-ptx:
	@echo 'skipped: make test-ptx executes what nvcc compiles, and there is no nvcc'
else
test-ptx: build/plain/zcomm_ptx_tests
	$(MAKE) --no-print-directory -j 2 $(PTX)
	$(PY) tests/ptx/run.py build/plain/zcomm_ptx_tests build/ptx $(PTX_TARGETS) --once $(PTX_ONCE)
endif

# The options of the kernels in src/CMakeLists.txt.
define COMPILE_PTX
	mkdir -p build/ptx
	$(NVCC) -ptx -std=c++20 -O3 -DNDEBUG -arch=compute_$* --diag-suppress=554 -Isrc -Iinclude $< -o $@
endef

build/ptx/codec_%.ptx: src/codec/cuda/codec_cuda.cu $(CXX_SOURCES)
	$(COMPILE_PTX)
build/ptx/lossless_%.ptx: src/codec/cuda/lossless_cuda.cu $(CXX_SOURCES)
	$(COMPILE_PTX)

# --- Style --------------------------------------------------------------------------------------------------------

# Needs neither a build nor torch: where there is no .venv yet, the tools have a small environment of their own.
LINT := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-lint)

$(LINT)/.lint: pyproject.toml
	$(NEED_PYTHON)
	@test -x $(LINT)/bin/python || $(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install -q $(call TOOLS_OF,lint)
	touch $@

CXX_FILES = $(shell git ls-files '*.hpp' '*.cpp' '*.inl' '*.cu' '*.cuh')

format: $(LINT)/.lint  ## apply the form that `make lint` checks
	$(LINT)/bin/ruff check --fix .
	$(LINT)/bin/ruff format .
	$(LINT)/bin/clang-format -i $(CXX_FILES)

lint: $(LINT)/.lint  ## check formats, types, common mistakes in C++, and spelling
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy
	$(LINT)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	@# clang-tidy reads the commands of a build that is not carried out: the core, with a CUDA that lives on the host. Most
	@# of its time goes into headers, so it gets many sources as one. Kernels are the same files in every instruction set.
	$(NEED_COMPILER)
	$(LINT)/bin/cmake -S . -B build/tidy -DZCOMM_CUDA=OFF -DZCOMM_BUILD_TESTS=ON -DDOCTEST_INCLUDE_DIR=unused \
	  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=15 >/dev/null
	$(LINT)/bin/python $(LINT)/bin/run-clang-tidy.py -quiet -hide-progress -p build/tidy \
	  -clang-tidy-binary $(LINT)/bin/clang-tidy -header-filter '^$(CURDIR)/(include|src)/' \
	  'zcomm_core_' zcomm_nccl_on_host '^$(CURDIR)/src/(?!.*_avx)'
	$(LINT)/bin/codespell zcomm tools src include python tests bench examples docs README.md CHANGELOG.md

clean:  ## remove what the other targets have built
	rm -rf build out $(VENV) .venv-lint .venv-docs
