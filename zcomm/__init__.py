"""zcomm: compressed collectives for sharded training.

``torch.distributed.init_process_group("zcomm")`` is all that a trainer needs. Formats, defaults and promises are in the
README; ``zcomm.Options`` and the ``ZCOMM_*`` environment variables change them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcomm._version import __version__

if TYPE_CHECKING:
    from zcomm import codec, ddp, fsdp, reference, testing
    from zcomm._core import ArgumentError, CallStats, Error, TimeoutError, TransportError
    from zcomm.communicator import Communicator, unique_id
    from zcomm.distributed.exact_group import new_exact_group
    from zcomm.distributed.flight_recorder import dump_flight_recorder
    from zcomm.distributed.metrics import metrics, write_prometheus
    from zcomm.distributed.options import Options
    from zcomm.distributed.overrides import exact, override, set_step
    from zcomm.distributed.report import Report, report
    from zcomm.distributed.stats import Stats, stats
    from zcomm.feedback import ErrorFeedback

__all__ = [
    "ArgumentError",
    "CallStats",
    "Communicator",
    "Error",
    "ErrorFeedback",
    "Options",
    "Report",
    "Stats",
    "TimeoutError",
    "TransportError",
    "__version__",
    "codec",
    "ddp",
    "dump_flight_recorder",
    "exact",
    "fsdp",
    "install_as_default",
    "metrics",
    "new_exact_group",
    "override",
    "reference",
    "report",
    "set_step",
    "stats",
    "testing",
    "unique_id",
    "write_prometheus",
]

# Loaded on first use: `import torch` runs _autoload, and must stay fast and free of the C++ modules.
_MODULES = ("codec", "ddp", "fsdp", "reference", "testing")
_HOMES = {
    "ArgumentError": "zcomm._core",
    "CallStats": "zcomm._core",
    "Error": "zcomm._core",
    "TimeoutError": "zcomm._core",
    "TransportError": "zcomm._core",
    "Options": "zcomm.distributed.options",
    "Communicator": "zcomm.communicator",
    "unique_id": "zcomm.communicator",
    "ErrorFeedback": "zcomm.feedback",
    "new_exact_group": "zcomm.distributed.exact_group",
    "exact": "zcomm.distributed.overrides",
    "override": "zcomm.distributed.overrides",
    "set_step": "zcomm.distributed.overrides",
    "dump_flight_recorder": "zcomm.distributed.flight_recorder",
    "metrics": "zcomm.distributed.metrics",
    "write_prometheus": "zcomm.distributed.metrics",
    "Stats": "zcomm.distributed.stats",
    "stats": "zcomm.distributed.stats",
    "Report": "zcomm.distributed.report",
    "report": "zcomm.distributed.report",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"zcomm.{name}")
    raise AttributeError(f"module 'zcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def install_as_default() -> None:
    """Make ``init_process_group()`` without a backend's name, and trainers that look the default up, use zcomm for CPU
    and CUDA tensors. Call it before the first process group is made."""
    import torch.distributed as dist

    _autoload()
    dist.Backend.default_device_backend_map.update(cpu="zcomm", cuda="zcomm")


def _autoload() -> None:
    """Registers the backend. An entry point calls it at the end of ``import torch``; importing zcomm does, too."""
    import torch.distributed as dist

    if not dist.is_available() or "ZCOMM" in dist.Backend._plugins:
        return

    def create(distributed_options: Any, options: Any) -> Any:
        from zcomm.distributed.backend import create_backend

        return create_backend(distributed_options, options)

    dist.Backend.register_backend("zcomm", create, extended_api=True, devices=["cpu", "cuda"])


def _register_if_torch_is_there() -> None:
    import importlib.util
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and not hasattr(torch, "distributed"):
        return  # torch itself is being imported, and will call _autoload
    if importlib.util.find_spec("torch") is not None:
        _autoload()


_register_if_torch_is_there()
