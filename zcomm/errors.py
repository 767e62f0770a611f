"""Errors of the core. Wrong options and arguments in Python raise ValueError or TypeError."""

from zcomm._core import ArgumentError, Error, TimeoutError, TransportError

__all__ = ["ArgumentError", "Error", "TimeoutError", "TransportError"]
