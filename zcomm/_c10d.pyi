"""The torch binding: python/c10d. What torch.distributed itself calls of a backend is left out."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import Backend, ReduceOp, Store, Work

from zcomm._core import BlockFormat

Op: TypeAlias = "ReduceOp | ReduceOp.RedOpType"
Parts: TypeAlias = "Sequence[tuple[int, bool]]"  # number of elements of a shard, whether they are sent exactly

OVERRIDE_KEY: str

def names_group(pattern: str, description: str) -> bool: ...  # of the option ``groups``
def has_high_priority() -> bool: ...  # TORCH_NCCL_HIGH_PRIORITY, by default on

COLLECTIVES: tuple[str, ...]
OPTION_NAMES: tuple[str, ...]

class Options(Backend.Options):  # type: ignore[misc]
    """A property for each option."""

    compress: str
    all_gather: str
    reduce_scatter: str
    all_reduce: str
    exchanges: str
    min_bytes: int
    forms: tuple[str, ...]
    groups: dict[str, str]
    strict: bool
    node_size: int | None
    chunk_bytes: int | None
    decisions: str
    verify: bool | str
    sample_errors_every: int  # no option
    def __init__(self, **fields: Any) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class PolicyOverride:
    def __init__(self, **fields: Any) -> None: ...

class Site:
    """A call site, which counts the calls and bytes that are sent for it."""

    def __init__(self, name: str, parts: Sequence[str]) -> None: ...
    calls: int
    intra_node_bytes: int
    inter_node_bytes: int

class HookedCall:
    """A collective or message as the functions of ``zcomm.register_hook`` see it."""

    group: str
    collective: str
    verdict: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    description: str
    site: str
    intra_node_bytes: int | None
    inter_node_bytes: int | None
    begun: float

def set_call_hook(function: Callable[[str, HookedCall, Any], None] | None) -> None: ...
def start_flight_recorder() -> None: ...  # raises ValueError where the environment has no number of calls
def flight_recorder_dump() -> bytes: ...
def hash_of(shard: torch.Tensor) -> int:
    """Of contiguous float values in host memory: the same on all machines. Raises ValueError for others."""

def capture_of(device: torch.device) -> int:
    """The CUDA graph that the current stream of ``device`` records, a number of its own; 0 if it runs."""

class ShardMark:
    """Kernels that find that a shard on a GPU has changed: zcomm/shard_mark.hpp. They run on the current stream."""

    def __init__(self, device: torch.device) -> None: ...
    def note(self, shard: torch.Tensor) -> None: ...
    def check(self, shard: torch.Tensor, secondary: torch.Tensor) -> None: ...
    has_changed: bool

#: The gathered, scattered or reduced tensor, or a gather's shard; or of each planned part a tensor, with those of all
#: ranks or of this one.
TensorOrParts: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

class Verdict:
    """Why a call stays exact: docs/options.md."""

    name: str
    value: int
    compressed: Verdict
    single_rank: Verdict
    not_a_float: Verdict
    dtype: Verdict
    operation: Verdict
    format_exact: Verdict
    layout: Verdict
    group: Verdict
    form: Verdict
    unmarked: Verdict
    out_of_place: Verdict
    in_place: Verdict
    min_bytes: Verdict
    no_gain: Verdict

class Operation:
    """A collective that is planned, held by who makes it again and again. Bytes are those that this rank sends; None:
    the values decide."""

    description: str
    ranks: str  # "NODESxRANKS", or the ranks of each node if they differ
    format: str
    segments: list[tuple[int, str]]
    intra_node_bytes: int | None
    inter_node_bytes: int | None
    secondary_bytes: int
    largest_secondary_bytes: int
    residual_bytes: int
    wires_bytes: int
    secondary: torch.Tensor | None
    generation: int  # of the secondary shard: 0 before a gather, while one is under way, and after one that failed
    sent_bytes: int  # to each holder by the last lossless gather
    def bound_to(self, data: torch.Tensor) -> Operation: ...  # uint8, secondary_bytes long
    def run(
        self,
        output: TensorOrParts | None,
        input: TensorOrParts | None = None,  # None: a gather once more, from what is kept
        op: Op | None = None,
        *,
        residual: tuple[torch.Tensor, float, bool] | None = None,  # uint8, residual_bytes long; its decay; is it empty?
        site: Site | None = None,
        async_op: bool = False,
        wires: torch.Tensor | None = None,  # uint8, wires_bytes long: what a gather leaves in place of its output
    ) -> Work: ...
    # On the current stream, which must wait for the gather.
    def decode(self, output: TensorOrParts, wires: torch.Tensor) -> None: ...

class ProcessGroup(Backend):  # type: ignore[misc]
    def __init__(
        self,
        exact_cpu: Backend,
        options: Options,
        agree: Callable[[], list[int]],
        make_exact_cuda: Callable[[], Backend],
        make_transport_group: Callable[[int], tuple[Backend, int, Store]],
        meet_for_nccl: Callable[[], tuple[bytes, Store]],
        message_store: Store,
        split: Callable[[Store, list[int], Any], Backend],
        look_up: Callable[[int, str, str, str, str, bool], tuple[float, ...] | None] | None,
        now: Callable[[], int],
        decided: Callable[[], None],
        no_node_memory: Callable[[str], None],
        at_shutdown: Callable[[], None],
    ) -> None: ...
    options: Options
    is_aborted: bool
    is_strict: bool
    description: str  # torch's, of the group
    def split(self, store: Store, ranks: list[int], options: Any) -> Backend: ...
    def shutdown(self) -> None: ...
    connections: int  # set before the first compressed call of CPU tensors; else raises ValueError on another number
    def perform_nocolor_split(self, device: Any) -> None: ...
    # A gather; with ``op`` a reduce-scatter, and without ``input`` an all-reduce.
    def plan(
        self,
        output: TensorOrParts,
        input: TensorOrParts | None = None,
        op: Op | None = None,
        *,
        formats: PolicyOverride | None = None,
        parts: Parts = [],
        feedback: BlockFormat | None = None,
        again: bool = False,
        leaves_wires: bool = False,  # a gather, whose wires run() is to leave: on GPUs it has one chunk
        compared: bool = False,
        like: Operation | None = None,
    ) -> Operation | Verdict: ...
    def plan_lossless(
        self, output: TensorOrParts, input: TensorOrParts, *, parts: Parts = [], like: Operation | None = None
    ) -> Operation: ...
    def prepare(
        self, gathers: Sequence[tuple[Operation, torch.Tensor, Site | None]], *, async_op: bool = False
    ) -> Work: ...
    def gather_numbers(self, output: torch.Tensor, input: torch.Tensor, *, site: Site) -> Work: ...
    def set_step(self, step: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def decisions(self) -> list[dict[str, Any]]: ...
    def end_step(self) -> None: ...
    def step_decision(self) -> dict[str, Any] | None: ...
    def quantization_errors(self) -> list[dict[str, Any]]: ...

class ElasticGroup(Backend):  # type: ignore[misc]
    """Of torch 2.14 and later."""

    def __init__(
        self,
        rank: int,
        size: int,
        options: Options,
        handle: str,
        make: Callable[[Any, Callable[[], None]], ProcessGroup],
    ) -> None: ...
    @property
    def members(self) -> ProcessGroup | None: ...  # None before the first reconfigure()
    def shutdown(self) -> None: ...
    def perform_nocolor_split(self, device: Any) -> None: ...
