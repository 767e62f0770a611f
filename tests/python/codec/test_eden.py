"""The rotation and the codes of EDEN, by the executable specification: what they promise about numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcomm_bench import reference as ref
from zcomm_bench.eden_reference import signs

ROTATIONS = [32, 64, 128, 256, 512]
EDEN = [name for name, kind in ref.KINDS.items() if kind.levels]


@pytest.mark.parametrize("size", ROTATIONS)
def test_the_rotation_is_that_of_walsh_and_hadamard_with_random_signs(size):
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    assert (matrix @ matrix == size * np.eye(size)).all()
    flips = signs(size)
    x = np.random.default_rng(1).integers(-(2**10), 2**10, (5, size)).astype(np.float32)  # all sums are exact
    flat = np.append(x.reshape(-1), np.arange(7, dtype=np.float32))
    assert np.array_equal(ref.rotate(flat, size)[:-7].reshape(-1, size), x * flips @ matrix / size)
    assert np.array_equal(ref.rotate_back(flat, size)[:-7].reshape(-1, size), x @ matrix * flips)
    assert np.array_equal(ref.rotate(flat, size)[-7:], flat[-7:])
    assert np.array_equal(ref.rotate_back(ref.rotate(flat, size), size), flat)


def test_a_short_block_is_rotated_in_groups_of_32():
    x = np.random.default_rng(2).standard_normal(128 + 70).astype(np.float32)
    rotated = ref.rotate(x, 128)
    assert np.array_equal(rotated[:128], ref.rotate(x[:128], 128))
    assert np.array_equal(rotated[128:], ref.rotate(x[128:], 32))


def test_signs_are_those_of_the_position():
    """No row of the Walsh-Hadamard matrix is near to the signs: the largest of 512 sums of 512 random signs would
    exceed 6 times sqrt(512) with a probability of 1e-6."""
    assert np.array_equal(signs(512)[:32], signs(32))
    for size in ROTATIONS:
        assert np.abs(ref.rotate(np.ones(size, np.float32), size)).max() * size <= 6 * np.sqrt(size)


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 127))
def test_rotating_back_and_forth_is_off_by_the_last_bits(seed, exponent):
    """Each of ten steps is off by 2^-24 of a sum of magnitudes: forward of 32 of m / 32, back of 32 of m, at most."""
    x = (np.random.default_rng(seed).uniform(-1, 1, 320) * 2.0**exponent).astype(np.float32)
    largest = np.abs(x.astype(np.float64)).reshape(-1, 32).max(axis=1).repeat(32)
    error = np.abs(ref.rotate_back(ref.rotate(x, 32), 32).astype(np.float64) - x)
    assert (error <= 2 * 32 * 5.01 * 2.0**-24 * largest + 2.0**-140).all()


def test_a_block_that_overflows_on_the_way_back_saturates():
    limit = np.float32(ref.LARGEST_FINITE["float32"])
    mixed = np.where(np.arange(512) % 3, limit, -limit)
    for x in (np.full(512, limit), np.full(512, -limit), mixed, np.r_[limit, np.zeros(511)]):
        for format in ("eden2:512", "eden3:32", "eden4:128"):
            decoded = ref.decode(ref.encode(x.astype(np.float32), format), format, 512, "float32")
            assert np.isfinite(decoded).all()
    first = signs(512)[0]
    assert (ref.rotate_back(np.full(512, limit), 512) == np.r_[first * limit, np.zeros(511, np.float32)]).all()
    assert ref.rotate_back(np.full(512, 2.0**119, np.float32), 512)[0] == first * limit
    below = np.nextafter(np.float32(2.0**119), np.float32(0))
    assert ref.rotate_back(np.full(512, below), 512)[0] == first * 512 * below


def norms(values, size):
    """The norm of each block of ``size`` values, in float64."""
    blocks = np.zeros(-(-values.size // size) * size)
    blocks[: values.size] = values
    return np.linalg.norm(blocks.reshape(-1, size), axis=1)


@given(
    seed=st.integers(0, 2**32 - 1),
    format=st.sampled_from([f"{kind}:{size}" for kind in EDEN for size in (32, 128, 512)]),
    exponent=st.integers(-105, 120),
    shape=st.sampled_from(["normal", "sparse", "peak", "row", "equal"]),
)
def test_the_error_of_eden_is_not_larger_than_the_block(seed, format, exponent, shape):
    """|x - x'| <= (1 + 2^-6) |x| for every block, also where the rotation makes one large element of it. A scale is
    the one of least error times a, with a in [1, 1.25]. The squared error is |x|^2 (1 - (2a - a^2) cos^2). The 2^-6
    covers integers of 10 bits and a scale of 8."""
    rng, size = np.random.default_rng(seed), ref.parse_format(format).block_size
    n = 3 * size + 5
    x = rng.standard_normal(n)
    if shape == "sparse":
        x *= rng.random(n) < 2 / size
    elif shape == "peak":  # the rotation makes it one element
        x = np.resize(signs(size), n)
    elif shape == "row":
        x = np.resize(ref.rotate_back(np.eye(size, dtype=np.float32)[int(rng.integers(size))], size), n)
    elif shape == "equal":
        x = np.full(n, x[0])
    x = (x * 2.0**exponent).astype(np.float32)
    error = x.astype(np.float64) - ref.decode(ref.encode(x, format), format, n, "float32")
    assert (norms(error, size) <= (1 + 2.0**-6) * norms(x.astype(np.float64), size)).all()


@pytest.mark.parametrize("dtype", sorted(ref.DTYPES))
@pytest.mark.parametrize(
    ("kind", "least", "most"), [("eden2", 0.12, 0.134), ("eden3", 0.033, 0.036), ("eden4", 0.009, 0.0097)]
)
def test_eden_has_the_error_of_its_paper_on_any_values(kind, least, most, dtype):
    """D / (1 - D) for the distortion D of Lloyd and Max: 0.1175, 0.0345, 0.0095; a little less in small blocks. No
    block shrinks: its projection on itself is right, but for the rounding of the scale."""
    rng = np.random.default_rng(8)
    for values in (rng.standard_normal(2**17), rng.laplace(size=2**17), rng.standard_t(5, 2**17)):
        x = ref.narrow(values.astype(np.float32), dtype)
        exact = ref.widen(x).astype(np.float64)
        format = f"{kind}:128"
        decoded = ref.decode(ref.encode(x, format), format, x.size, "float32").astype(np.float64)
        assert least <= np.sum((decoded - exact) ** 2) / np.sum(exact**2) <= most
        projected = np.sum((decoded * exact).reshape(-1, 128), axis=1) / norms(exact, 128) ** 2
        assert np.abs(projected - 1).max() <= 2.0**-7


@pytest.mark.parametrize("kind", EDEN)
def test_eden_keeps_zeros_and_drops_what_is_next_to_nothing(kind):
    for x in (np.zeros(70), np.full(70, -0.0), np.full(70, 2.0**-135), np.r_[np.zeros(69), 2.0**-149]):
        wire = ref.encode(x.astype(np.float32), f"{kind}:32")
        assert not wire.any()
        assert ref.decode(wire, f"{kind}:32", 70, "float32").tobytes() == bytes(280)
