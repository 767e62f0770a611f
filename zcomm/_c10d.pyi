"""The torch binding: python/c10d. What torch.distributed itself calls of a backend is left out."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch._C._distributed_c10d import Backend, ReduceOp, Store, Work

from zcomm._core import BlockFormat

Op: TypeAlias = "ReduceOp | ReduceOp.RedOpType"
Parts: TypeAlias = "Sequence[tuple[int, bool]]"  # number of elements of a shard, whether they are sent exactly

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

class Decision(TypedDict):
    collective: str
    dtype: str
    least_bytes: int
    format: str
    compressed: bool
    one_hop: bool
    exact_seconds: float
    compressed_seconds: float
    one_hop_seconds: float
    rounds: int
    again: bool

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
    def intra_node_bytes(self) -> int: ...
    @property
    def inter_node_bytes(self) -> int: ...

def flight_recorder_dump() -> bytes: ...

class _testing:  # a submodule
    @staticmethod
    def measure_on_device(original: torch.Tensor, decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

class PlannedGather:
    """Of a collective, held by who makes it again and again. Bytes are those that this rank sends."""

    @property
    def description(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def intra_node_bytes(self) -> int: ...
    @property
    def inter_node_bytes(self) -> int: ...
    @property
    def segments(self) -> list[tuple[int, str]]: ...
    @property
    def secondary_bytes(self) -> int: ...
    @property
    def largest_secondary_bytes(self) -> int: ...
    def run(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        secondary: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
        site: Site | None = None,
        async_op: bool = False,
    ) -> Work: ...
    def run_from_secondary(
        self, output: torch.Tensor, secondary: torch.Tensor, *, site: Site | None = None, async_op: bool = False
    ) -> Work: ...

class HeldShards:
    """What the gathers of a plan of differences refer to. ``data``: uint8, of the plan's ``kept_bytes``.

    ``generation`` is 0 while a gather is under way, and after one that failed."""

    @property
    def data(self) -> torch.Tensor: ...
    @property
    def generation(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...  # to each holder by the last gather

class PlannedDifferences:
    @property
    def description(self) -> str: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def largest_kept_bytes(self) -> int: ...
    def hold(self, data: torch.Tensor) -> HeldShards: ...  # uint8, kept_bytes long
    def run(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        held: HeldShards,
        *,
        site: Site | None = None,
        async_op: bool = False,
    ) -> Work: ...
    def run_from_held(
        self, output: torch.Tensor, held: HeldShards, *, site: Site | None = None, async_op: bool = False
    ) -> Work: ...

class Residual:
    """Of one call, in the format that was planned. ``data``: uint8, of the plan's ``residual_bytes``."""

    def __init__(self, data: torch.Tensor, *, decay: float, empty: bool) -> None: ...

class PlannedReduce:
    @property
    def description(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def intra_node_bytes(self) -> int: ...
    @property
    def inter_node_bytes(self) -> int: ...
    @property
    def segments(self) -> list[tuple[int, str]]: ...
    @property
    def residual_bytes(self) -> int: ...
    def run(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Op,
        *,
        residual: Residual | None = None,
        site: Site | None = None,
        async_op: bool = False,
    ) -> Work: ...

class PlannedAllReduce:
    @property
    def description(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def intra_node_bytes(self) -> int: ...
    @property
    def inter_node_bytes(self) -> int: ...
    @property
    def residual_bytes(self) -> int: ...
    def run(
        self, tensor: torch.Tensor, op: Op, *, residual: Residual | None = None, async_op: bool = False
    ) -> Work: ...

class ProcessGroup(Backend):  # type: ignore[misc,unused-ignore]
    def __init__(
        self,
        exact_cpu: Backend,
        store: Store,
        options: Options,
        agree: Callable[[], list[int]],
        make_exact_cuda: Callable[[], Backend],
        make_transport_group: Callable[[], tuple[Backend, int]],
        meet_for_nccl: Callable[[], str],
        split: Callable[[Store, list[int], Any], Backend],
        predict: Callable[[str, str, int, str, bool], tuple[float, float, float]] | None,
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
    def plan_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        formats: PolicyOverride | None = None,
        parts: Parts = [],
        again: bool = False,
        kept: PlannedGather | None = None,
    ) -> PlannedGather | None: ...
    def plan_differences(
        self, output: torch.Tensor, input: torch.Tensor, *, kept: PlannedDifferences | None = None
    ) -> PlannedDifferences: ...
    def prepare_differences(
        self,
        gathers: Sequence[tuple[PlannedDifferences, torch.Tensor, HeldShards, Site | None]],
        *,
        async_op: bool = False,
    ) -> Work: ...
    def plan_reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Op,
        *,
        formats: PolicyOverride | None = None,
        parts: Parts = [],
        feedback: BlockFormat | None = None,
        kept: PlannedReduce | None = None,
    ) -> PlannedReduce | None: ...
    def plan_all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op,
        *,
        formats: PolicyOverride | None = None,
        feedback: BlockFormat | None = None,
        kept: PlannedAllReduce | None = None,
    ) -> PlannedAllReduce | None: ...
    @property
    def plans_made(self) -> int: ...
    def set_step(self, step: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def decisions(self) -> list[Decision]: ...
    def losses(self) -> list[Loss]: ...
