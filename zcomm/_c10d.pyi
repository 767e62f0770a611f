"""The torch binding: python/c10d. What torch.distributed itself calls of a backend is left out."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch._C._distributed_c10d import Backend, ReduceOp, Store, Work

Op: TypeAlias = "ReduceOp | ReduceOp.RedOpType"
Segments = Sequence[tuple[int, str]]  # number of elements, format
Feedback = tuple[torch.Tensor, str, float, bool]  # residual, its format, decay, whether it is empty

class Calls(TypedDict):
    calls: int
    bytes: int

class Loss(TypedDict):
    collective: str
    site: str
    hop: str
    format: str
    calls: int
    samples: int
    elements: float
    blocks: float
    finite_blocks: float
    nonzero: float
    zeroed: float
    signal: float
    noise: float
    block_errors: float
    largest_block_error: float

torch_version: str
OVERRIDE_KEY: str

class OptionField:
    """A row of the table of options."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...  # "text", "integer" or "flag": what its environment variable is read as
    @property
    def overridable(self) -> bool: ...
    @property
    def compared(self) -> bool: ...  # between ranks

OPTION_FIELDS: tuple[OptionField, ...]

class Options(Backend.Options):  # type: ignore[misc,unused-ignore]
    """A property for each option."""

    def __init__(self, **fields: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def handshake_text(self) -> str: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class PolicyOverride:
    def __init__(self, **fields: Any) -> None: ...

class Site:
    """A call site, which counts the calls and bytes that are sent for it."""

    def __init__(self, name: str, parts: Sequence[str]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def inside_bytes(self) -> int: ...
    @property
    def between_bytes(self) -> int: ...

class _testing:  # a submodule
    @staticmethod
    def measure_on_device(original: torch.Tensor, decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

class ProcessGroup(Backend):  # type: ignore[misc,unused-ignore]
    def __init__(
        self,
        exact_cpu: Backend,
        store: Store,
        options: Options,
        agree: Callable[[], list[int]],
        make_exact_cuda: Callable[[], Backend],
        make_transport_group: Callable[[], Backend],
        meet_for_nccl: Callable[[], str],
        split: Callable[[Store, list[int], Any], Backend],
        at_shutdown: Callable[[], None],
    ) -> None: ...
    @property
    def options(self) -> Options: ...
    @property
    def is_aborted(self) -> bool: ...
    @property
    def is_strict(self) -> bool: ...
    def split(self, store: Store, ranks: list[int], options: Any) -> Backend: ...
    def shutdown(self) -> None: ...
    def perform_nocolor_split(self, device: Any) -> None: ...
    def gather_format(self, output: torch.Tensor, input: torch.Tensor, format: str = "") -> str: ...
    def reduce_format(self, output: torch.Tensor, input: torch.Tensor, op: Op, formats: str = "") -> str: ...
    def all_reduce_format(self, tensor: torch.Tensor, op: Op, formats: str) -> str: ...
    def all_gather_segments(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        segments: Segments,
        secondary: torch.Tensor | None,
        reference: torch.Tensor | None,
        site: Site,
        async_op: bool,
    ) -> Work: ...
    def reduce_scatter_segments(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Op,
        segments: Segments,
        feedback: Feedback | None,
        site: Site,
        async_op: bool,
    ) -> Work: ...
    def all_reduce_feedback(
        self, tensor: torch.Tensor, op: Op, formats: str, feedback: Feedback, async_op: bool
    ) -> Work: ...
    def feedback_bytes(self, input: torch.Tensor, segments: Segments, format: str) -> int: ...
    def all_reduce_feedback_bytes(self, tensor: torch.Tensor, formats: str, format: str) -> int: ...
    def secondary_bytes(self, output: torch.Tensor, segments: Segments) -> tuple[int, int]: ...
    def gather_secondary(
        self, output: torch.Tensor, secondary: torch.Tensor, segments: Segments, site: Site, async_op: bool
    ) -> Work: ...
    def set_step(self, step: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def losses(self) -> list[Loss]: ...
