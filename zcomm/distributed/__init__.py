"""What `torch.distributed` sees of zcomm: the backend, its options, and what it tells about its work."""
