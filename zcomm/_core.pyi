"""The C++ core: python/core."""

import builtins
from collections.abc import Sequence
from datetime import timedelta

Values = tuple[int, int, str]  # address, number of elements, dtype
Segments = Sequence[tuple[int, str]]  # number of elements, format
Wire = tuple[int, str, str]  # address, format, dtype of the values
Term = tuple[int, str, str, float]  # and the wire's factor
# Jobs in the memory of a GPU, as include/zcomm/lossless.hpp has them.
EncodeLossless = tuple[Values, Values, int, int, int, int]  # values, base, generation, message, hash, num_bytes
DecodeLossless = tuple[int, int, Values, int, int, int]  # message, num_bytes, base, generation, hash, status
CheckHash = tuple[Values, int, int]  # values, hash, status

DEFAULT_CHUNK_BYTES: int
DEFAULT_GPU_CHUNK_BYTES: int

class Error(RuntimeError): ...
class ArgumentError(Error, ValueError): ...
class TransportError(Error): ...
class TimeoutError(TransportError, builtins.TimeoutError): ...

class BlockFormat:
    block_size: int
    def __init__(self, text: str) -> None: ...

class HopFormats:
    intra_node: BlockFormat
    inter_node: BlockFormat
    def __init__(self, text: str) -> None: ...

ELEMENT_KINDS: tuple[tuple[str, bool], ...]  # name, whether blocks have scales

class WireLayout:
    num_blocks: int
    codes_offset: int
    codes_bytes: int
    num_bytes: int
    def __init__(self, format: str, dtype: str, num_elements: int) -> None: ...

# Address, number of elements, dtype, number of its device, and whether it is contiguous, read-only, and a copy.
def read_dlpack(capsule: object) -> tuple[int, int, str, int, bool, bool, bool]: ...
def encode(
    values: Values,
    format: str,
    wire: int,
    isa: str = "",
    device: int = -1,
    stream: int = 0,
    seed: int = 0,
    first_element: int = 0,
) -> None: ...
def decode(wire: Wire, values: Values, isa: str = "", device: int = -1, stream: int = 0) -> None: ...
def decode_sum(
    wires: Sequence[Term], factor: float, values: Values, isa: str = "", device: int = -1, stream: int = 0
) -> None: ...
def decode_sum_encode(
    wires: Sequence[Term],
    num_elements: int,
    format: str,
    wire: int,
    isa: str = "",
    device: int = -1,
    stream: int = 0,
    seed: int = 0,
    first_element: int = 0,
) -> None: ...
def max_lossless_bytes(num_elements: int) -> int: ...
def encode_difference(values: Values, base: Values, body: int, isa: str = "") -> tuple[int, int]: ...
def decode_difference(body: int, num_bytes: int, base: Values, isa: str = "") -> int: ...
def hash_of_values(values: Values, isa: str = "") -> int: ...
def encode_lossless_on_device(jobs: Sequence[EncodeLossless], device: int = -2, stream: int = 0) -> None: ...
def decode_lossless_on_device(jobs: Sequence[DecodeLossless], device: int = -2, stream: int = 0) -> None: ...
def check_hashes_on_device(jobs: Sequence[CheckHash], device: int = -2, stream: int = 0) -> None: ...
def cpu_isas() -> list[str]: ...
def set_num_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def cuda_toolkit() -> str: ...
def cuda_targets() -> str: ...
def cuda_device_count() -> int: ...
def load_nccl(wheel_path: str = "") -> tuple[str, int]: ...
def wait_for(stream: int, earlier: int, device: int) -> None: ...
def synchronize(stream: int) -> None: ...

Moves = list[tuple[int, int]]  # peer, and the rank whose slot it is
Hop = tuple[Moves, Moves]  # what is sent, and what is received

class Topology:
    def __init__(self, node_ids: Sequence[int]) -> None: ...
    def same_node(self, a: int, b: int) -> bool: ...
    def reduce_hops(self, rank: int) -> tuple[Hop, Hop]: ...

class LinkBytes:
    intra_node: int
    inter_node: int

class GatherPlan:
    bytes_by_hop: list[LinkBytes]
    bytes: LinkBytes
    def __init__(
        self,
        topology: Topology,
        rank: int,
        lengths: Sequence[int],
        dtype: str,
        segments: Segments,
        chunk_bytes: int = ...,
    ) -> None: ...
    @staticmethod
    def in_one_chunk(topology: Topology, lengths: Sequence[int], dtype: str, format: str) -> GatherPlan: ...
    def trace(self, grouped: bool, again: bool = False) -> list[TraceStep]: ...

class ReducePlan:
    bytes_by_hop: list[LinkBytes]
    bytes: LinkBytes
    def __init__(
        self,
        topology: Topology,
        rank: int,
        lengths: Sequence[int],
        dtype: str,
        segments: Segments,
        chunk_bytes: int = ...,
    ) -> None: ...
    def trace(self, grouped: bool) -> list[TraceStep]: ...

class AllReducePlan:
    bytes_by_hop: list[LinkBytes]
    def __init__(
        self, topology: Topology, rank: int, num_elements: int, dtype: str, formats: str, chunk_bytes: int = ...
    ) -> None: ...
    def trace(self, grouped: bool) -> list[TraceStep]: ...

class ExchangePlan:
    def __init__(
        self,
        topology: Topology,
        rank: int,
        sent: Sequence[int],
        received: Sequence[int],
        dtype: str,
        formats: str,
        chunk_bytes: int = ...,
    ) -> None: ...
    def trace(self, grouped: bool) -> list[TraceStep]: ...

class LosslessPlan:
    num_chunks: int
    bytes_from_secondary: LinkBytes
    secondary_bytes: int
    largest_secondary_bytes: int
    def __init__(
        self, topology: Topology, rank: int, lengths: Sequence[int], dtype: str, chunk_bytes: int = ...
    ) -> None: ...
    def bytes(self, body_bytes: int) -> LinkBytes: ...

class TraceStep:
    class Kind:
        CODEC: TraceStep.Kind
        TRANSFER: TraceStep.Kind
        WAIT: TraceStep.Kind

    kind: TraceStep.Kind
    number: int
    num_bytes: int
    sent: LinkBytes
    num_ring_steps: int
    is_beside: bool

class SecondaryShard:
    generation: int
    sent_bytes: int
    def __init__(self, address: int, num_bytes: int) -> None: ...

class Operation:
    description: str
    secondary_bytes: int
    residual_bytes: int

class Gather(Operation):
    def bound_to(self, secondary: SecondaryShard) -> Gather: ...

class CallStats:
    """Bytes that one call sent from this rank."""

    intra_node_bytes: int
    inter_node_bytes: int
    wire_bytes: int

class Communicator:
    rank: int
    size: int
    num_nodes: int
    is_closed: bool
    def make_all_gather(self, slots: Sequence[Values], segments: Segments) -> Operation: ...
    def make_lossless_gather(self, slots: Sequence[Values]) -> Operation: ...
    def make_reduce_scatter(
        self, slots: Sequence[Values], segments: Segments, feedback: str | None = None
    ) -> Operation: ...
    def make_all_reduce(self, tensor: Values, formats: str) -> Operation: ...
    def make_all_to_all(self, inputs: Sequence[Values], outputs: Sequence[Values], formats: str) -> Operation: ...
    def make_gather(self, root: int, part: Values, formats: str) -> Operation: ...
    def make_scatter(self, root: int, part: Values, formats: str) -> Operation: ...
    def make_broadcast(self, root: int, values: Values, format: str) -> Operation: ...
    def make_message(self, source: int, target: int, values: Values, formats: str) -> Operation: ...
    def run(
        self,
        operation: Operation,
        inputs: Sequence[Values],
        outputs: Sequence[Values],
        timeout: timedelta,
        stream: int = 0,
        *,
        factor: float = 1.0,
        feedback: tuple[int, str, float, bool] | None = None,  # address, format, decay, whether it is empty
    ) -> CallStats: ...
    def set_seed(self, seed: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...

def make_unique_id() -> bytes: ...
def bootstrap_over_nccl(
    communicator: int, token: int, timeout: timedelta
) -> tuple[int, int, bytes, list[int]]: ...  # rank, device, unique id, tokens of all ranks
def connect(
    rank: int,
    size: int,
    unique_id: bytes,
    node_ids: Sequence[int],
    device: int,
    timeout: timedelta,
    chunk_bytes: int,
    connect_all: bool,
) -> Communicator: ...
def make_local_communicators(node_ids: Sequence[int], chunk_bytes: int) -> list[Communicator]: ...
