"""Lets trainers that insist on CUDA run on a torch for CPUs: "cuda" is host memory, and torch.cuda's functions are
stand-ins. Call :func:`enter` before the trainer is imported. Nothing of a GPU is tested by it."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

PROPERTIES = SimpleNamespace(name="CPU", total_memory=1 << 34, multi_processor_count=4, major=9, minor=0)
NVTX = SimpleNamespace(
    range_push=lambda *_: None, range_pop=lambda *_: None, range=lambda *_, **__: contextlib.nullcontext()
)


class Stream:
    """A stream whose work is always done. Also an event."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def nothing(self, *_: Any) -> None: ...

    wait = wait_stream = wait_event = synchronize = record = nothing

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def _host(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.split(":")[0] == "cuda") or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


class _HostMemory(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu" if isinstance(kwargs["device"], int) else _host(kwargs["device"])
        if getattr(function, "__name__", "") == "cuda":  # tensor.cuda()
            return args[0]
        return function(*map(_host, args), **kwargs)


def _nothing(*_: Any, **__: Any) -> None: ...


def _returns(value: Any) -> Any:
    return lambda *_, **__: value


def enter() -> None:
    """For the rest of this process."""
    import torch._dynamo.trace_rules
    import torch._inductor.codecache
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton

    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # of torch as it is
    for name in ("triton", "triton.language"):
        sys.modules[name] = MagicMock(__version__="3.6.0")
    _HostMemory().__enter__()
    replaced = {
        **{"Event": Stream, "Stream": Stream, "current_stream": Stream, "default_stream": Stream, "nvtx": NVTX},
        **dict.fromkeys(("synchronize", "set_device", "empty_cache", "manual_seed", "manual_seed_all"), _nothing),
        **dict.fromkeys(("set_rng_state", "_lazy_init", "_lazy_call", "reset_peak_memory_stats"), _nothing),
        **dict.fromkeys(("is_available", "is_initialized"), _returns(True)),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), _returns(0)),
        "is_current_stream_capturing": _returns(False),
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "device": lambda *_: contextlib.nullcontext(),
        "device_count": _returns(1),
        "current_device": _returns("cpu"),
        "get_device_properties": _returns(PROPERTIES),
        "get_device_name": _returns("CPU"),
        "get_device_capability": _returns((9, 0)),
        "memory_stats": _returns({}),
        "mem_get_info": _returns((1 << 33, 1 << 34)),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    }
    for name, other in replaced.items():
        setattr(torch.cuda, name, other)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "current_device"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.default_generators = (torch.default_generator,)
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    kind = torch.Tensor.type
    torch.Tensor.type = (  # type: ignore[method-assign, assignment]
        lambda self, *given, **named: (
            kind(self, *given, **named) if given or named else "torch.cuda." + kind(self).rpartition(".")[2]
        )
    )
