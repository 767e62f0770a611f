"""What a host of two to eight GPUs can tell in minutes: stages as in bench/one_gpu, with a rank on each GPU."""

import bench.one_gpu  # noqa: F401  which a rehearsal needs before torch
