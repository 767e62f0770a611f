"""The workshop of zcomm: the planner, the benchmark of the collectives, and the network lab."""
