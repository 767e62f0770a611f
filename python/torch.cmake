# Python_*, TORCH_VERSION, TORCH_DIR, TORCH_INCLUDE_DIRS: of the torch that this Python has.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

# Asked from torch itself: find_package(Torch) leaks flags and, on a CUDA torch, asks for the whole toolkit.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import torch; print(torch.__version__.split('+')[0], torch.utils.cmake_prefix_path.rsplit('/', 2)[0])"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE torch_missing ERROR_VARIABLE torch_error)
if(torch_missing)
  message(FATAL_ERROR "zcomm's torch binding is built against the installed torch, and there is none: install torch 2.11 "
    "or later first, then use 'pip install --no-build-isolation'.\n${torch_error}")
endif()
separate_arguments(torch_facts)
list(GET torch_facts 0 TORCH_VERSION)
list(GET torch_facts 1 TORCH_DIR)
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "zcomm needs torch 2.11 or later, found ${TORCH_VERSION}")
endif()
set(TORCH_INCLUDE_DIRS ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include)
