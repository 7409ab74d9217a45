import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import UsageError
from jitllm.units import counted, format_duration, format_rate, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("400K", 400 * 2**10),
        ("512M", 512 * 2**20),
        ("12G", 12 * 2**30),
        ("12g", 12 * 2**30),
        ("3GiB", 3 * 2**30),
        ("3 GB", 3 * 2**30),
        ("1.5G", 3 * 2**29),
        (".5k", 512),
        ("2T", 2**41),
        (" 7 ", 7),
    ],
)
def test_parse_size_reads_what_people_write(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "G", "-1G", "1X", "1e9", "nan", "1 2", "12Gi b", "١G", "1iB", "9" * 5000, "9000P"),
        *("0.5", ".1", "0.0001K"),
    ],
)
def test_parse_size_refuses_by_value_and_says_what_to_write(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, "-maxmem")
    assert str(caught.value).startswith(f"-maxmem {text!r}")
    assert caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1.00 KiB"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 * 1.234, "1.23 GiB"),
        (-(2**20), "-1.00 MiB"),
        (2**70, "1048576.00 PiB"),
    ],
)
def test_format_size(num_bytes: float, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 2**59))
def test_format_size_is_close_and_parses_back(num_bytes: int) -> None:
    text = format_size(num_bytes)
    assert float(text.split()[0]) < 1024
    assert parse_size(text) == pytest.approx(num_bytes, rel=0.006)


def test_format_rate() -> None:
    assert format_rate(1.5 * 2**30) == "1.50 GiB/s"
    assert format_rate(41.72, "tok") == "41.7 tok/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00085, "850 us"),
        (0.0009999, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (1.234, "1.23 s"),
        (59.96, "1m00s"),
        (125, "2m05s"),
        (3720, "1h02m"),
        (-0.5, "-500 ms"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e6))
def test_format_duration_never_shows_a_full_unit(seconds: float) -> None:
    text = format_duration(seconds)
    assert not re.match(r"1000|60(\.0)? s|\d+m60s|\d+h60m", text)


@pytest.mark.parametrize(
    ("num", "noun", "text"),
    [(0, "token", "0 tokens"), (1, "frame", "1 frame"), (2, "entry", "2 entries")],
)
def test_a_count_agrees_with_its_noun(num: int, noun: str, text: str) -> None:
    assert counted(num, noun) == text
