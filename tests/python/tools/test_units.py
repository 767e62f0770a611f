"""Sizes, rates, times and shapes: what is read, what is refused, and how they print."""

import pytest

from zcomm._units import parse_nodes, parse_rate, rate_text, size_text, time_text
from zcomm_bench.spec import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("1K", 1024), ("1k", 1024), ("1.5M", 3 << 19), ("128M", 128 << 20), ("2G", 2 << 30)],
)
def test_sizes_parse_as_in_nccl_tests(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1 K", "1KB", "1T", "0x10"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "rate"), [("400gbit", 50e9), ("12.5GB/s", 12.5e9), ("100mbit", 12.5e6)])
def test_rates_parse(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "100", "fast", "-1gbit", "0gbit", "1 gbit", "100mb"])
def test_bad_rates_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate"):
        parse_rate(text)


def test_nodes_parse() -> None:
    assert parse_nodes("2x4") == (2, 4)
    for text in ("2", "2x", "0x2", "2x2x2", "axb"):
        with pytest.raises(ValueError, match="nodes: expected NODESxRANKS"):
            parse_nodes(text)


def test_figures_print_with_their_units() -> None:
    sizes = [size_text(size) for size in (12, 1 << 16, 3 << 19, 80e9, 1 << 42)]
    assert sizes == ["12 B", "64 KiB", "1.5 MiB", "74.51 GiB", "4 TiB"]
    assert [rate_text(rate) for rate in (3.125e9, 12.5e6)] == ["25 Gbit/s", "0.1 Gbit/s"]
    assert [time_text(seconds) for seconds in (75.0, 0.01234, 2e-6, 0.1316)] == ["75 s", "12.3 ms", "2 us", "132 ms"]
    assert time_text(1234.0) == "1230 s"
