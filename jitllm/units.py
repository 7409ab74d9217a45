"""Sizes, rates and durations as people write and read them.

Knows numbers and words. Knows nothing of what is measured. Sizes are powers of 1024, whichever of
`K`, `KB` and `KiB` is written: memory is bought that way, and a budget that is read too small by
7 % would be a surprise.
"""

import re
from decimal import Decimal

from jitllm.errors import UsageError

_PREFIXES = "KMGTP"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *(?:([KMGTP])I?)?B?", re.IGNORECASE | re.ASCII)
_MAX_BYTES = 2**63 - 1


def parse_size(text: str, what: str = "size") -> int:
    """Bytes that `text` names: "12G", "512M", "400K", "3GiB", "1.5 GB" or a plain number.

    `what` names the value in the error, best as the user wrote it ("-maxmem").
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{what} {text!r} is not a size", "write bytes or a number with K, M, G or T, like 512M"
        )
    number, prefix = match.groups()
    exponent = _PREFIXES.index(prefix.upper()) + 1 if prefix else 0
    num_bytes = int(Decimal(number) * 1024**exponent)
    if not num_bytes and Decimal(number):  # not 0, which often means something
        raise UsageError(f"{what} {text!r} is less than a byte", "did you mean K, M, G or T?")
    if num_bytes > _MAX_BYTES:
        raise UsageError(f"{what} {text!r} is more than any machine has", "write a smaller size")
    return num_bytes


def format_size(num_bytes: float) -> str:
    """`num_bytes` in the largest unit that leaves a number of at least one: "1.23 GiB"."""
    scaled, unit = float(num_bytes), "B"
    for prefix in _PREFIXES:
        if abs(scaled) < (1023.5 if unit == "B" else 1023.995):  # what is not rounded up to 1024
            break
        scaled, unit = scaled / 1024, f"{prefix}iB"
    return f"{scaled:.0f} B" if unit == "B" else f"{scaled:.2f} {unit}"


def format_rate(per_second: float, unit: str = "") -> str:
    """Bytes a second ("1.23 GiB/s"), or so many of a `unit` ("41.7 tok/s")."""
    return f"{per_second:.1f} {unit}/s" if unit else f"{format_size(per_second)}/s"


def format_duration(seconds: float) -> str:
    """`seconds` with three digits or in clock parts: "850 us", "12.3 ms", "1.23 s", "2m05s"."""
    if seconds == 0:
        return "0 s"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    for scale, unit in ((1e6, "us"), (1e3, "ms"), (1.0, "s")):
        scaled = seconds * scale
        if scaled < (999.5 if unit != "s" else 59.95):
            return f"{scaled:.{_num_decimals(scaled)}f} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def counted(num: int, noun: str) -> str:
    """How many of a `noun`: "1 token", "2 tokens", "0 entries"."""
    if num == 1:
        return f"{num} {noun}"
    return f"{num} {noun[:-1]}ies" if noun.endswith("y") else f"{num} {noun}s"


def _num_decimals(number: float) -> int:
    """Decimals that make three digits of a number below 1000."""
    return 2 if number < 9.995 else 1 if number < 99.95 else 0
