"""Where tests and benchmarks run: hosts and links on one machine, and ranks on its GPUs."""
