"""What tests of the codec draw: formats, sizes around their blocks, values of every kind."""

import numpy as np
from hypothesis import strategies as st

from zcomm_bench import reference as ref

DTYPES = sorted(ref.DTYPES)
BLOCK_SIZES = [32, 64, 96, 128, 256, 1056, 4096]
PLAIN = ["exact", "bf16"] + [f"{kind}:{size}" for kind in ("int8", "int4") for size in BLOCK_SIZES]
OTHERS = [f"fp8:{size}" for size in (32, 96, 256, 4096)]
OTHERS += [f"{kind}:{size}:stochastic" for kind in ("int8", "int4") for size in (32, 96, 128, 4096)]
EDEN = [f"eden{bits}:{size}" for bits in (2, 3, 4) for size in (32, 64, 128, 256, 512)]
FORMATS = PLAIN + OTHERS
SEEDS = st.sampled_from([0, 1, 2**32, 2**64 - 1])
FIRST_ELEMENTS = st.sampled_from([0, 32, 2**35 - 64, 2**36 + 96])
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, 2.0**-126, 2.0**-149, -(2.0**-130), 65504.0, 65520.0]
SPECIAL += [ref.LARGEST_FINITE["float32"], -ref.LARGEST_FINITE["float32"], ref.LARGEST_FINITE["bfloat16"], 6e-8, 1e-40]


@st.composite
def sizes(draw, format):
    block = max(ref.parse_format(format).block_size, 32)
    edges = [0, 1, 2, 31, 33, block - 1, block, block + 1, 2 * block + 17, 4095, 4097, 3 * 4096 + 5]
    return draw(st.sampled_from(edges) | st.integers(0, 3 * block))


@st.composite
def value_arrays(draw, dtype, size):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):  # any bit pattern, nearly all blocks of several powers of two; without NaN and infinity
        bits = rng.integers(0, 2**32, size, np.uint32) & np.uint32(0xFF7FFFFF if draw(st.booleans()) else 0x8FFFFFFF)
        x = bits.view(np.float32)
    else:
        with np.errstate(over="ignore"):
            x = (rng.standard_normal(size) * 2.0 ** draw(st.integers(-150, 128))).astype(np.float32)
    if size:
        for _ in range(draw(st.integers(0, 3))):
            x[draw(st.integers(0, size - 1))] = draw(st.sampled_from(SPECIAL))
    return ref.narrow(x, dtype)
