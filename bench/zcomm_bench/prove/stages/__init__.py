"""What every rank runs: each stage returns the raw samples that the report holds, the same on all ranks."""
