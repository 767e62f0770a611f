"""zcomm: compressed collectives for sharded training.

``torch.distributed.init_process_group("zcomm")`` is all that a trainer needs. docs/options.md has formats and defaults,
which ``zcomm.Options`` and the ``ZCOMM_*`` environment variables change; docs/promises.md has the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcomm._version import __version__

if TYPE_CHECKING:
    from zcomm import codec, ddp, errors, fsdp, megatron, outer, testing
    from zcomm._formats import formats
    from zcomm.communicator import Communicator
    from zcomm.distributed.errors import CorruptedWireError
    from zcomm.distributed.groups import dump_flight_recorder
    from zcomm.distributed.hooks import register_hook
    from zcomm.distributed.options import Options
    from zcomm.distributed.overrides import exact, override
    from zcomm.distributed.report import report
    from zcomm.distributed.stats import stats

__all__ = [
    "Communicator",
    "CorruptedWireError",
    "Options",
    "__version__",
    "codec",
    "ddp",
    "dump_flight_recorder",
    "errors",
    "exact",
    "formats",
    "fsdp",
    "install_as_default",
    "megatron",
    "outer",
    "override",
    "register_hook",
    "report",
    "stats",
    "testing",
]

# Names loaded on first use: `import torch` runs _autoload, and must stay fast and free of the C++ modules.
_HOMES = {
    "Communicator": "zcomm.communicator",
    "CorruptedWireError": "zcomm.distributed.errors",
    "Options": "zcomm.distributed.options",
    "dump_flight_recorder": "zcomm.distributed.groups",
    "exact": "zcomm.distributed.overrides",
    "formats": "zcomm._formats",
    "override": "zcomm.distributed.overrides",
    "register_hook": "zcomm.distributed.hooks",
    "report": "zcomm.distributed.report",
    "stats": "zcomm.distributed.stats",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:  # a module
        return importlib.import_module(f"zcomm.{name}")
    raise AttributeError(f"module 'zcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def install_as_default() -> None:
    """Make ``init_process_group()`` without a backend's name, and trainers that look the default up, use zcomm for CPU
    and CUDA tensors. Call it before the first process group is made.

    Example::

        zcomm.install_as_default()
        dist.init_process_group()
    """
    import torch.distributed as dist

    _autoload()
    dist.Backend.default_device_backend_map.update(cpu="zcomm", cuda="zcomm")


def _autoload() -> None:
    """Register the backend. An entry point calls it at the end of ``import torch``; importing zcomm does, too."""
    import torch.distributed as dist

    if not dist.is_available() or "ZCOMM" in dist.Backend._plugins:
        return

    def create(distributed_options: Any, options: Any) -> Any:
        from zcomm._deepspeed import watch_deepspeed
        from zcomm.distributed.backend import create_backend
        from zcomm.fsdp.adoption import watch_fsdp1, watch_fsdp2

        watch_fsdp1()
        watch_fsdp2()
        watch_deepspeed()
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
