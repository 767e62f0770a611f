"""Lossless differences in the memory of a GPU: messages, values, hashes and errors, compared with the CPU codec.

``device`` is where torch puts what the kernels work on: "cuda", or "cpu" where CUDA lives on the host.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from support.expected import assert_same_bits
from zcomm import _core, codec

HALVES = (torch.bfloat16, torch.float16)
NANS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
RATES = (1.0, 1e-3, 1e-4, 1e-6, 0.0)
TILE = 2048
HEADER = struct.Struct("<IBBxxQQQQ24x")
MAGIC, VERSION = 0x3631445A, 1
NO_HEADER, OTHER_GENERATION, OTHER_BASE, WRONG_BODY, WRONG_RESULT, NOT_KEPT = (1 << bit for bit in range(6))
UNTOUCHED = 0xAB
Place = Any  # a torch.device or its name


@dataclass(frozen=True)
class Update:
    """Values on the CPU that follow others. ``generation``: of the base; 0 means that the values are sent whole."""

    base: torch.Tensor
    values: torch.Tensor
    generation: int = 7

    @property
    def base_hash(self) -> int:
        return hash_of(self.base) if self.generation else 0


def hash_of(values: torch.Tensor) -> int:
    return _core.hash_of_values(codec.view_of(values, "values"))


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def message_of(update: Update) -> torch.Tensor:
    """Make a message as in docs/wire_format.md, with the body of the CPU codec."""
    kind, body, result_hash = 0, bytes_of(update.values), hash_of(update.values)
    if update.generation:
        difference, result_hash = codec.encode_difference(update.values, update.base.clone())
        kind, body = 1, torch.from_numpy(difference)
    num_bytes = HEADER.size + body.numel()
    header = HEADER.pack(MAGIC, VERSION, kind, num_bytes, update.generation, update.base_hash, result_hash)
    return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), body])


class Placed:
    """A copy of ``values`` that begins ``offset`` elements past a multiple of 16 bytes, with memory around it."""

    def __init__(self, values: torch.Tensor, device: Place, offset: int) -> None:
        self._slice = slice(offset, offset + values.numel())
        size = values.element_size() * (values.numel() + offset + 8)
        around = torch.full((size,), UNTOUCHED, dtype=torch.uint8).view(values.dtype)
        around[self._slice] = values
        self._memory = around.to(device, copy=True)
        name = str(values.dtype).removeprefix("torch.")
        self.view = (self._memory.data_ptr() + values.element_size() * offset, values.numel(), name)

    def check(self, expected: torch.Tensor, what: object) -> None:
        memory = self._memory.cpu()
        assert_same_bits(memory[self._slice], expected, what)
        memory[self._slice] = 0
        rest = bytes_of(memory) == UNTOUCHED
        assert rest.sum() == rest.numel() - bytes_of(expected).numel(), (what, "memory beside the values")


class Number:
    """An integer of 8 bytes; a status, which has 4, is their lower half."""

    def __init__(self, value: int, device: Place) -> None:
        self._memory = torch.frombuffer(bytearray(value.to_bytes(8, "little")), dtype=torch.int64).to(device, copy=True)
        self.address = self._memory.data_ptr()

    @property
    def value(self) -> int:
        return self._memory.item() % 2**64


class Sender:
    """A job that encodes, and its memory."""

    def __init__(self, update: Update, device: Place, offset: int = 0) -> None:
        self.update = update
        self.values = Placed(update.values, device, offset)
        self.base = Placed(update.base, device, 3 * offset % 8)
        room = HEADER.size + _core.max_lossless_bytes(update.values.numel())
        self.message = torch.full((room,), UNTOUCHED, dtype=torch.uint8, device=device)
        self.hash, self.num_bytes = Number(update.base_hash, device), Number(0, device)
        places = (self.message.data_ptr(), self.hash.address, self.num_bytes.address)
        self.job = (self.values.view, self.base.view, update.generation, *places)

    def check(self, what: object) -> None:
        expected, sent = message_of(self.update), self.message.cpu()
        assert self.num_bytes.value == expected.numel(), what
        assert_same_bits(sent[: expected.numel()], expected, ("message", what))
        assert (sent[expected.numel() :] == UNTOUCHED).all(), ("memory behind the message", what)
        self.values.check(self.update.values, ("values", what))
        self.base.check(self.update.values, ("base", what))
        assert self.hash.value == hash_of(self.update.values), what


class Receiver:
    """A job that decodes ``message``, and its memory."""

    def __init__(
        self, update: Update, message: torch.Tensor, device: Place, offset: int = 0, base_hash: int | None = None
    ) -> None:
        self.update, self.base_hash = update, update.base_hash if base_hash is None else base_hash
        self.message = message.to(device, copy=True)
        self.base = Placed(update.base, device, offset)
        self.hash, self.status = Number(self.base_hash, device), Number(0, device)
        places = (self.hash.address, self.status.address)
        self.job = (self.message.data_ptr(), message.numel(), self.base.view, update.generation, *places)

    def check(self, errors: int, what: object) -> None:
        """The values and their hash; or NaNs alone, and the hash of before."""
        values = self.update.values
        assert self.status.value == errors, what
        self.base.check(values if errors == 0 else nans_like(values), ("decoded", what))
        assert self.hash.value == (hash_of(values) if errors == 0 else self.base_hash), what


def nans_like(values: torch.Tensor) -> torch.Tensor:
    return torch.full(values.shape, NANS[values.dtype], dtype=torch.int16).view(values.dtype)


def check_updates(updates: Sequence[Update], device: Place, what: object, step: int = 0) -> None:
    """Encode and decode, all in one call; values begin 0, ``step``, 2 * ``step``... elements past a multiple of 8."""
    senders = [Sender(update, device, i * step % 8) for i, update in enumerate(updates)]
    receivers = [Receiver(update, message_of(update), device, 5 * i * step % 8) for i, update in enumerate(updates)]
    _core.encode_lossless_on_device([sender.job for sender in senders])
    _core.decode_lossless_on_device([receiver.job for receiver in receivers])
    _core.synchronize(0)
    for i, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        sender.check((what, i))
        receiver.check(0, (what, i))


def updated(num: int, dtype: torch.dtype, rate: float, generation: int = 7, seed: int = 0) -> Update:
    """Weights of deviation 0.02 and updates of 0.3 times a learning rate; 0: frozen weights."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(num, generator=generator) * 0.02).to(dtype)
    values = (base.float() + torch.randn(num, generator=generator) * 0.3 * rate).to(dtype)
    return Update(base, values, generation)


def any_bits(num: int, dtype: torch.dtype, generation: int = 7, seed: int = 0) -> Update:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (2, num), generator=generator, dtype=torch.int16)
    return Update(bits[0].view(dtype), bits[1].view(dtype), generation)


def near_any_bits(dtype: torch.dtype) -> Update:
    """Every pattern of 16 bits, and few units in the last place from it."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    shuffled = bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))]
    steps = torch.randint(-20, 21, bits.shape, generator=torch.Generator().manual_seed(1))
    base, values = (each.to(torch.int16).view(dtype) for each in (shuffled, shuffled + steps))
    return Update(base, values)


def updates_of(num: int) -> list[Update]:
    """Make updates of every kind: learning rates, frozen weights, any bits, and whole values."""
    updates = []
    for dtype in HALVES:
        updates += [updated(num, dtype, rate, seed=num) for rate in RATES]
        updates += [any_bits(num, dtype), any_bits(num, dtype, 2**40 + 1), any_bits(num, dtype, 0)]
        updates += [updated(num, dtype, 1e-3, generation=0)]
    return updates


# --- What is tested, on a GPU and on a CUDA that lives on the host


def check_sizes(device: Place) -> None:
    for num in (0, 1, 31, TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 9001, 20_011):
        check_updates(updates_of(num), device, num)


def check_unaligned(device: Place) -> None:
    for num, step in itertools.product((1, 33, 4099), (1, 3)):
        check_updates(updates_of(num), device, (num, step), step)


def check_every_pattern(device: Place) -> None:
    check_updates([near_any_bits(dtype) for dtype in HALVES], device, "every pattern")


def check_many_jobs(device: Place) -> None:
    """Check jobs of all sizes, more than fit a launch."""
    jobs = [updated(i * i % 2100, HALVES[i % 2], 1e-3, 0 if i % 5 == 0 else 9, seed=i) for i in range(130)]
    check_updates(jobs, device, "many jobs")
    for call in (
        _core.encode_lossless_on_device,
        _core.decode_lossless_on_device,
        _core.check_hashes_on_device,
    ):
        call([])


def check_nothing_sent(device: Place) -> None:
    """Encoding that only keeps the values and their hash."""
    for num in (1, 9001):
        sender = Sender(updated(num, torch.bfloat16, 1e-3), device, 1)
        values, base, generation, _, hash_address, _ = sender.job
        _core.encode_lossless_on_device([(values, base, generation, 0, hash_address, 0)])
        _core.synchronize(0)
        sender.base.check(sender.update.values, num)
        assert sender.hash.value == hash_of(sender.update.values)
        assert (sender.message == UNTOUCHED).all()


def check_kept_values(device: Place) -> None:
    """check: sets its bit where values are no longer those of a hash, and leaves NaNs; else it changes nothing."""
    for num, dtype in itertools.product((1, 2049, 9001), HALVES):
        update = updated(num, dtype, 1e-3)
        other = bytes_of(update.values.clone())
        other[-1] ^= 1
        for values, errors in ((update.values, 0), (other.view(dtype), NOT_KEPT)):
            kept, status = Placed(values, device, 3), Number(0, device)
            expected_hash = Number(hash_of(update.values), device)
            _core.check_hashes_on_device([(kept.view, expected_hash.address, status.address)])
            _core.synchronize(0)
            assert status.value == errors, (num, dtype)
            kept.check(nans_like(values) if errors else values, (num, dtype, errors))


Damage = Callable[[torch.Tensor], torch.Tensor]


def flipped(place: int) -> Damage:
    def damage(message: torch.Tensor) -> torch.Tensor:
        message[place] ^= 1
        return message

    return damage


DAMAGES: dict[str, tuple[Damage, int]] = {
    "nothing arrived": (lambda message: message[:0], NO_HEADER),
    "half a header": (lambda message: message[:32], NO_HEADER),
    "the end is cut off": (lambda message: message[:-16], NO_HEADER),
    "16 bytes too many": (lambda message: torch.cat([message, torch.zeros(16, dtype=torch.uint8)]), NO_HEADER),
    "magic": (flipped(0), NO_HEADER),
    "version": (flipped(4), NO_HEADER),
    "its size": (flipped(9), NO_HEADER),
    "the header's zeros": (flipped(63), NO_HEADER),
    "kind": (flipped(5), OTHER_GENERATION),
    "generation": (flipped(16), OTHER_GENERATION),
    "hash of the base": (flipped(24), OTHER_BASE),
    "hash of the result": (flipped(32), WRONG_RESULT),
    "the table of tiles": (flipped(HEADER.size), WRONG_BODY),
}


def check_damages(device: Place) -> None:
    """Check that wrong headers and wrong bodies are found, as by the CPU."""
    for dtype in HALVES:
        update = updated(9001, dtype, 1e-3)
        for name, (damage, errors) in DAMAGES.items():
            check_decoding(update, damage(message_of(update)), errors, device, (name, dtype))


def check_damaged_bodies(device: Place) -> None:
    generator, seen = torch.Generator().manual_seed(0), 0
    for num, rate in itertools.product((100, TILE + 1, 9001), RATES):
        update = updated(num, torch.bfloat16, rate)
        receivers, errors = [], []
        for _ in range(20):
            message = message_of(update)
            place, mask = (int(torch.randint(1, 2**31, (1,), generator=generator)) for _ in range(2))
            message[HEADER.size + place % (message.numel() - HEADER.size)] ^= mask % 255 + 1
            receivers.append(Receiver(update, message, device))
            errors.append(errors_of_body(update, message))
            seen |= errors[-1]
        _core.decode_lossless_on_device([receiver.job for receiver in receivers])
        _core.synchronize(0)
        for number, (receiver, expected) in enumerate(zip(receivers, errors, strict=True)):
            receiver.check(expected, (num, rate, number))
    assert seen == WRONG_BODY | WRONG_RESULT


def errors_of_body(update: Update, message: torch.Tensor) -> int:
    """Return the errors that the CPU finds."""
    base = update.base.clone()
    try:
        _, result_hash = codec.decode_difference(message[HEADER.size :], base)
    except RuntimeError:
        return WRONG_BODY
    return 0 if result_hash == hash_of(update.values) else WRONG_RESULT


def check_other_bases(device: Place) -> None:
    """A base of another generation or other values; whole values where none are expected, or of another size."""
    update = updated(9001, torch.float16, 1e-3)
    whole = Update(update.base, update.values, 0)
    stray = Update(bytes_of(update.base.clone()).bitwise_xor(1).view(torch.float16), update.values)
    longer = updated(9002, torch.float16, 1e-3, generation=0)
    cases = {
        "a later generation": (Update(update.base, update.values, 8), update, OTHER_GENERATION),
        "another base": (stray, update, OTHER_BASE),
        "a difference to nothing": (whole, update, OTHER_GENERATION),
        "whole values for a difference": (update, whole, OTHER_GENERATION | OTHER_BASE),
        "whole values of another size": (longer, whole, WRONG_BODY),
    }
    for name, (here, sent, errors) in cases.items():
        check_decoding(here, message_of(sent), errors, device, name)
    # Something has written to the base, whose hash is not taken again.
    check_decoding(stray, message_of(update), WRONG_RESULT, device, "a stray write", update.base_hash)


def check_decoding(
    update: Update, message: torch.Tensor, errors: int, device: Place, what: object, base_hash: int | None = None
) -> None:
    receiver = Receiver(update, message, device, base_hash=base_hash)
    _core.decode_lossless_on_device([receiver.job])
    _core.synchronize(0)
    receiver.check(errors, what)


CASES = (
    check_sizes,
    check_unaligned,
    check_every_pattern,
    check_many_jobs,
    check_nothing_sent,
    check_kept_values,
    check_damages,
    check_damaged_bodies,
    check_other_bases,
)
