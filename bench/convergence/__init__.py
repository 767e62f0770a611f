"""What compression costs in loss: `python -m bench.convergence.run`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # the model and the text are those of train_gpt.py
