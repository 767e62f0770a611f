"""The benchmark of the collectives: `python -m zcomm bench`."""
