"""What one GPU can tell in minutes: each module is a stage of `make gpu`, `python -m bench.one_gpu.NAME --out FOLDER`.

With TESTS_GPU_DEVICE=stand-in it is a rehearsal: the same program on the stand-in for a GPU, with tiny sizes.
"""

import os
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1]
IS_REHEARSAL = os.environ.get("TESTS_GPU_DEVICE") == "stand-in"

sys.path.append(str(BENCH))
if IS_REHEARSAL:
    sys.path.append(str(BENCH.parent / "tests"))
    from support import cuda_on_host

    cuda_on_host.enter()
