# The torch releases that the binding is built for: ZCOMM_TORCH, or the one that this Python has.
# Sets TORCH_DIRS, and for the first of them TORCH_VERSION, TORCH_DIR and TORCH_INCLUDE_DIRS.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(CMAKE_CROSSCOMPILING)  # the names of modules, which CMake asks of no Python then
  set(Python_SOABI cpython-${Python_VERSION_MAJOR}${Python_VERSION_MINOR}-${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)
endif()
set(ZCOMM_TORCH "" CACHE STRING "Folders of torch, one per minor version, to build bindings for; empty: the installed one")

# Asked from torch itself: find_package(Torch) leaks flags and, on a CUDA torch, asks for the whole toolkit.
# The second attempt is for pip's build isolation: -I looks past it, at what the environment itself has.
function(zcomm_installed_torch result)
  foreach(isolation "" -I)
    execute_process(
      COMMAND ${Python_EXECUTABLE} ${isolation} -c
        "import os, importlib.util; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE missing ERROR_VARIABLE error)
    if(NOT missing)
      set(${result} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "zcomm's torch binding is built against the installed torch, and there is none: install torch 2.11 "
    "or later first. If it is there, use 'pip install --no-build-isolation', which needs scikit-build-core, cmake and "
    "ninja.\n${error}")
endfunction()

# The version of the torch in a folder: its file is read, as it may be of another Python or machine.
function(zcomm_torch_version folder result)
  file(STRINGS ${folder}/version.py line REGEX "^__version__ =")
  if(NOT line MATCHES "['\"]([0-9]+\\.[0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "expected the version of torch in ${folder}/version.py, got '${line}'")
  endif()
  if(CMAKE_MATCH_1 VERSION_LESS 2.11)
    message(FATAL_ERROR "expected torch 2.11 or later, got ${CMAKE_MATCH_1} in ${folder}")
  endif()
  set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()

function(zcomm_torch_include_dirs folder result)
  set(${result} ${folder}/include ${folder}/include/torch/csrc/api/include PARENT_SCOPE)
endfunction()

set(TORCH_DIRS ${ZCOMM_TORCH})
if(NOT TORCH_DIRS)
  zcomm_installed_torch(TORCH_DIRS)
endif()
list(GET TORCH_DIRS 0 TORCH_DIR)
zcomm_torch_version(${TORCH_DIR} TORCH_VERSION)
zcomm_torch_include_dirs(${TORCH_DIR} TORCH_INCLUDE_DIRS)
