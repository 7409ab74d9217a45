"""Damage to model files: from a seed and a sound file to a damaged one.

A GGUF file has no checksums, so whatever is changed in it is believed. Half of what befalls a
container is rot: bytes change and its checksums tell. The other half is a forgery: values of the
header or weights change, and every checksum is made right again.
"""

from __future__ import annotations

import contextlib
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgpack
import xxhash

from jitllm.formats.jlm_head import EXTENT_ALIGNMENT, PROLOGUE, VERSION, checksum, round_up

Damage: TypeAlias = "Callable[[random.Random, bytearray], None]"
Plain: TypeAlias = "dict[str, Any]"

_EXTENT = struct.Struct("<QQQ")
_BEFORE = {"dense": 0, "blocks": 0, "experts": 8}
"""Sections of extents, and the bytes of a record that come before its extent."""

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 64, 255, 256, 1 << 14, 1 << 16, (1 << 31) - 1]
NUMBERS += [1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-6, 1e6, 1e38, 1e308, -1e308, math.inf, -math.inf]
FLOATS += [math.nan, 5e-324]
TEXTS = ["", "default", "x" * 5000, "\n", "\0", "\x1b[2J", "yarn", "linear", "none", "spm", "bpe"]
TEXTS += ["llama", "gemma3", "qwen2", "mistral3", "gpt-2", "llama-bpe", "{% for m in messages %}"]
TEXTS += ["{{ 1 / 0 }}", "{{ messages[0].content * 99999999 }}", "{{ raise_exception('no') }}"]
WORDS = [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000001]
WORDS += [0x7E007E00, 0x7C007C00, 0xFC00FC00, 0x7BFF7BFF, 0, 0xFFFFFFFF, 0x80808080, 0x00010001]


# --- bytes that rot ---------------------------------------------------------------------------


def flip(rng: random.Random, data: bytearray) -> None:
    """Some bits."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def put_number(rng: random.Random, data: bytearray) -> None:
    """A telling integer or float somewhere."""
    code = rng.choice(["<B", "<H", "<I", "<Q", "<f", "<d"])
    kinds = {"<f": [x for x in FLOATS if not 1e38 < abs(x) < math.inf], "<d": FLOATS}
    size = struct.calcsize(code)
    value = rng.choice(kinds.get(code, [n for n in NUMBERS if n < 1 << 8 * size]))
    struct.pack_into(code, data, rng.randrange(max(len(data) - size, 1)), value)


def wipe(rng: random.Random, data: bytearray) -> None:
    """A span of one value, as a lost sector leaves it."""
    start = rng.randrange(len(data))
    stop = min(start + rng.choice([4, 64, 512, 4096, len(data)]), len(data))
    data[start:stop] = rng.choice([b"\0", b"\xff", b"\x7f", b"A"]) * (stop - start)


def cut(rng: random.Random, data: bytearray) -> None:
    """Some bytes less: a few, or all the rest."""
    start = rng.randrange(len(data))
    del data[start : rng.choice([start + rng.randrange(1, 40), len(data)])]


def repeat(rng: random.Random, data: bytearray) -> None:
    """Some bytes more."""
    start, at = rng.randrange(len(data)), rng.randrange(len(data))
    data[at:at] = data[start : start + rng.randrange(1, 200)]


def move(rng: random.Random, data: bytearray) -> None:
    """A piece lies where another one did."""
    size = rng.choice([1, 8, 64, 4096])
    start, at = rng.randrange(len(data)), rng.randrange(len(data))
    piece = data[start : start + size]
    data[at : at + len(piece)] = piece


KEEPS_LENGTH: list[Damage] = [flip, put_number, put_number, wipe, move]
BYTES: list[Damage] = [*KEEPS_LENGTH, cut, repeat]


def rot(rng: random.Random, data: bytearray, regions: list[tuple[int, int]]) -> bytearray:
    """Damage of one to four regions `[start, stop)` of a file."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        start, stop = rng.choice(regions)
        part = data[start:stop]
        if len(part) > 8:
            rng.choice(BYTES)(rng, part)
        data = data[:start] + part + data[stop:]
    return data


def damaged_gguf(seed: int, sound: bytes) -> bytes:
    """A damaged GGUF file: half of them rot, mostly in the header; in the others fields lie."""
    rng = random.Random(f"gguf {seed}")
    fields = gguf_fields(sound)
    head = fields[-1][0] + 8
    if seed % 2:
        data = bytearray(sound)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            forge_field(rng, data, fields)
        return bytes(data)
    regions = [(0, 32), (0, 1200), (0, head), (head - 2000, head), (head, len(sound))]
    return bytes(rot(rng, bytearray(sound), [*regions, (0, len(sound))]))


def forge_field(rng: random.Random, data: bytearray, fields: list[tuple[int, str]]) -> None:
    """Another number in one field of the header, or that of a field like it."""
    at, code = rng.choice(fields)
    size = struct.calcsize(code)
    value = struct.unpack_from(code, data, at)[0]
    if rng.random() < 0.2:
        twin = rng.choice([other for other in fields if other[1] == code])[0]
        data[at : at + size] = data[twin : twin + size]
        return
    other = other_value(rng, value)
    if code in "<f<d":
        other = other if isinstance(other, float) and not 3e38 < abs(other) < math.inf else 0.0
    elif code != "<?":
        other = other % (1 << 8 * size) if isinstance(other, int) else 0
    struct.pack_into(code.upper() if code in "<b<h<i<q" else code, data, at, other)


def gguf_fields(data: bytes) -> list[tuple[int, str]]:
    """Place and code of the numbers in a GGUF header: counts, lengths, kinds, values, tensors.

    Of an array its kind, its length and its first item, which for a text is the text's length.
    """
    kinds = ["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"]
    scalars = dict(enumerate(kinds)) | {10: "<Q", 11: "<q", 12: "<d"}
    found: list[tuple[int, str]] = []
    at = 4

    def take(code: str) -> int:
        nonlocal at
        found.append((at, code))
        at += struct.calcsize(code)
        return int(struct.unpack_from(code, data, at - struct.calcsize(code))[0])

    def skip_text() -> None:
        nonlocal at
        at += struct.unpack_from("<Q", data, at)[0] + 8

    def value(kind: int) -> None:
        nonlocal at
        if kind == 9:
            kind, length = take("<I"), take("<Q")
            found.append((at, scalars.get(kind, "<Q")))
            for _ in range(length):
                if kind == 8:
                    skip_text()
                else:
                    at += struct.calcsize(scalars[kind])
        elif kind == 8:
            found.append((at, "<Q"))
            skip_text()
        else:
            take(scalars[kind])

    take("<I")
    num_tensors, num_keys = take("<Q"), take("<Q")
    for _ in range(num_keys):
        skip_text()
        value(take("<I"))
    for _ in range(num_tensors):
        skip_text()
        for _ in range(take("<I")):
            take("<Q")
        take("<I")
        take("<Q")
    return found


# --- containers -------------------------------------------------------------------------------


def is_forged(seed: int) -> bool:
    """Whether the checksums of a damaged container are made right again: three in four are."""
    return seed % 4 != 0


def damaged_jlm(seed: int, sound: bytes) -> bytes:
    """A damaged container."""
    rng = random.Random(f"jlm {seed}")
    if not is_forged(seed):
        return rotten_jlm(rng, sound)
    return rng.choice([forged_values, forged_values, forged_values, forged_weights, forged_bytes])(
        rng, sound
    )


def rotten_jlm(rng: random.Random, sound: bytes) -> bytes:
    """Bytes changed anywhere, and no checksum mended."""
    plain = header(sound)
    extents = [extent for extent, _ in _extents(plain)]
    regions = [(0, PROLOGUE.size), (0, _head_bytes(sound)), (0, len(sound))]
    regions += [(offset, offset + length) for offset, length, _ in extents]
    return bytes(rot(rng, bytearray(sound), regions))


def forged_bytes(rng: random.Random, sound: bytes) -> bytes:
    """Bytes of the header changed beneath msgpack, and its checksum mended."""
    head = _head_bytes(sound)
    body = bytearray(sound[PROLOGUE.size : head])
    before = len(body)
    start = rng.choice([0, 0, rng.randrange(len(body))])
    part = body[start : start + rng.choice([200, 4000, len(body)])]
    rng.choice(BYTES if rng.random() < 0.3 else KEEPS_LENGTH)(rng, part)
    body[start : start + before] = part + body[start + len(part) :]
    return sealed(bytes(body[:before].ljust(before, b"\0")), sound[head:])


def forged_weights(rng: random.Random, sound: bytes) -> bytes:
    """Weights of some tensors changed, and the checksums of their extents mended."""
    plain, data = header(sound), bytearray(sound)
    for _ in range(rng.choice([1, 1, 3, 12])):
        start, size = _place(rng, plain, rng.choice(plain["tensors"]))
        part = data[start : start + size]
        rng.choice([*KEEPS_LENGTH, put_words, put_words])(rng, part)
        data[start : start + size] = part
    return resealed(plain, bytes(data))


def put_words(rng: random.Random, data: bytearray) -> None:
    """NaN, infinity, huge, subnormal: as f32 or as two f16, here and there or everywhere."""
    word = struct.pack("<I", rng.choice(WORDS))
    step = 4 * rng.choice([1, 2, 16, 17, 136, max(len(data) // 4, 1)])
    for at in range(4 * rng.randrange(4), len(data) - 3, step):
        data[at : at + 4] = word


def forged_values(rng: random.Random, sound: bytes) -> bytes:
    """Values of the header changed, and its checksum mended."""
    plain = header(sound)
    forge = [forge_anything, forge_config, forge_config, forge_tensors, forge_extents]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        # What an earlier forgery took away cannot be forged again.
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
            rng.choice(forge)(rng, plain)
    return resealed(plain, sound)


def forge_anything(rng: random.Random, plain: Plain) -> None:
    """Any value of any section."""
    section = rng.choice(list(plain))
    holder, key = plain, section
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if rng.random() < 0.1 and len(holder) > 1:
        del holder[key]
    else:
        holder[key] = other_value(rng, holder[key])


def other_value(rng: random.Random, value: Any) -> Any:
    """What could stand in the place of `value`: of its kind, or of another one."""
    if rng.random() < 0.1:
        return rng.choice([None, True, 0, -1, 1.5, "text", b"bytes", [], {}, [[[[[1]]]]]])
    match value:
        case bool():
            return not value
        case int():
            near = [value + 1, value - 1, 2 * value, value // 2, -value, value ^ 1 << 20]
            return max(-(1 << 63), min(rng.choice([*near, *NUMBERS, -1, -(1 << 63)]), 2**64 - 1))
        case float():
            return rng.choice([*FLOATS, value * 10, -value, value / 1000])
        case str():
            at = rng.randrange(len(value) + 1)
            return rng.choice([value[:at] + value[at + 1 :], value + value[at:], *TEXTS])
        case bytes():
            data = bytearray(value or b"\0" * 24)
            rng.choice(BYTES)(rng, data)
            return bytes(data)
        case list():
            return rng.choice([value[1:], value * 2, value[::-1], [], value[:1] * len(value)])
        case dict():
            return rng.choice([{}, value | {"more": 1}, dict(list(value.items())[1:])])
    return rng.choice([0, "text", [0], {}])


def forge_config(rng: random.Random, plain: Plain) -> None:
    """A number of the model, or two that fit together and to no tensor's surprise."""
    config: Plain = plain["config"]
    heads, kv = config.get("attention.head_count"), config.get("attention.head_count_kv")
    k_dim = config.get("attention.key_length") or config["embedding_length"] // (heads or 1)
    many = rng.choice([2, 4, 8, 16, 32, 64])
    few = rng.choice([1, 2])
    more = {"attention.head_count": heads * many, "attention.head_count_kv": kv * many}
    fewer = {"attention.head_count": heads // few, "attention.head_count_kv": max(kv // few, 1)}
    sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    contexts = [1, 2, 7, 8, 63, 64, 65, 4096, 1 << 20, 1 << 24]
    choices: list[Plain] = [
        more | dict.fromkeys(sizes, k_dim // many),
        fewer | dict.fromkeys(sizes, k_dim * few),
        {"rope.dimension_count": rng.choice([2, 4, 6, k_dim, k_dim - 2])},
        {"context_length": rng.choice(contexts)},
        {"attention.sliding_window": rng.choice([0, 1, 2, 3, 64, 1 << 30, (1 << 31) - 1])},
        {"attention.sliding_window_pattern": rng.choice([0, 1, 2, [True, False, True], [1]])},
        {"rope.freq_base": rng.choice([*FLOATS, 1.00001, 1e29])},
        {"rope.freq_base_swa": rng.choice([*FLOATS, 1.00001, 1e29])},
        {"attention.layer_norm_rms_epsilon": rng.choice([*FLOATS, 1e-30, 0.999])},
        {"attention.scale": rng.choice([*FLOATS, 999.0])},
        {"rope.scaling.type": rng.choice(["yarn", "linear", "none", "longrope", "", 3])},
        {"rope.scaling.factor": rng.choice([*FLOATS, 1e-7, 1e5])},
        {"rope.scaling.original_context_length": rng.choice([1, 7, 100, 1 << 24])},
        {"rope.scaling.attn_factor": rng.choice([*FLOATS, 1e-3, 1e3])},
        {"rope.scaling.yarn_beta_fast": rng.choice([*FLOATS, 1e5])},
        {"rope.scaling.yarn_log_multiplier": rng.choice([*FLOATS, 500.0])},
        {"attention.temperature_scale": rng.choice([*FLOATS, 999.0])},
        {"block_count": rng.choice([0, 1, 2, 3, 4, 4096, 1 << 30])},
    ]
    if "expert_count" in config:
        counts = [0, 1, 2, 3, 7, 8, 9, 64, 1024, 1025, 1 << 30]
        keys = ["expert_count", "expert_used_count", "expert_group_count"]
        keys += ["expert_group_used_count", "leading_dense_block_count", "expert_shared_count"]
        choices += [{key: rng.choice(counts)} for key in keys]
        choices += [
            {"expert_group_count": rng.choice([2, 4]), "expert_group_used_count": 1},
            {"expert_gating_func": rng.choice([0, 1, 2, 3, 9])},
            {"expert_weights_norm": rng.choice([True, False, 1])},
            {"expert_weights_scale": rng.choice([*FLOATS, 1e-5, 9e5])},
        ]
    choice = rng.choice(choices)
    if rng.random() < 0.4:
        key = rng.choice(list(config))
        choice = {key: other_value(rng, config[key])}
    if "rope.scaling.factor" in choice or "rope.scaling.yarn_beta_fast" in choice:
        choice["rope.scaling.type"] = rng.choice(["yarn", "linear"])
    config.update(choice)


def forge_tensors(rng: random.Random, plain: Plain) -> None:
    """A tensor's role, block, format, shape or place; or two of them change places."""
    tensors = plain["tensors"]
    one, two = rng.choice(tensors), rng.choice(tensors)
    if rng.random() < 0.4:
        alike = [t for t in tensors if t[2:6] == one[2:6] and t is not one]
        two = rng.choice(alike or [two])
        for cell in rng.choice([(0, 1), (6, 7), (3, 4)]):
            one[cell], two[cell] = two[cell], one[cell]
    elif rng.random() < 0.2:
        tensors.remove(one)
    else:
        cell = rng.randrange(9)
        one[cell] = rng.choice([other_value(rng, one[cell]), two[cell]])
    if rng.random() < 0.2:
        rng.shuffle(tensors)


def forge_extents(rng: random.Random, plain: Plain) -> None:
    """Where the dense region and the blocks lie, and how long they are."""
    section = rng.choice(["dense", "blocks", "blocks", "experts", "vision"])
    if section == "vision" or rng.random() < 0.2:
        plain[section] = other_value(rng, plain[section])
        return
    if isinstance(plain[section], bytes):
        plain[section] = other_extents(rng, plain[section], _BEFORE[section])


def other_extents(rng: random.Random, packed: bytes, before: int) -> bytes:
    """Packed extents with one of them changed, two exchanged, or one more."""
    size = before + _EXTENT.size
    starts = range(0, len(packed) // size * size, size)
    heads = [packed[start : start + before] for start in starts]
    records = [list(_EXTENT.unpack_from(packed, start + before)) for start in starts]
    if not records:
        return packed + bytes(size)
    one, two = rng.choice(records), rng.choice(records)
    match rng.randrange(4):
        case 0:
            one[0], two[0] = two[0], one[0]
        case 1:
            cell = rng.randrange(3)
            other = other_value(rng, one[cell])
            one[cell] = other % (1 << 64) if isinstance(other, int) else 0
        case 2:
            one[0] = (one[0] + 4096 * rng.choice([1, -1, 1 << 30, 1 << 51])) % (1 << 64)
        case 3:
            records.append(list(one))
            heads.append(rng.choice(heads))
    if before and rng.random() < 0.3:
        rng.shuffle(heads)
    return b"".join(h + _EXTENT.pack(*r) for h, r in zip(heads, records, strict=True))


# --- the bytes of a container -----------------------------------------------------------------


def _head_bytes(data: bytes) -> int:
    return PROLOGUE.size + int(PROLOGUE.unpack_from(data)[3])


def header(data: bytes) -> Plain:
    """The header of a sound container as plain values."""
    plain: Plain = msgpack.unpackb(data[PROLOGUE.size : _head_bytes(data)])
    return plain


def sealed(body: bytes, rest: bytes, version: int = VERSION) -> bytes:
    """A container of this msgpack, whose checksum is right; `rest` follows the header."""
    magic = b"JITLLM\0\0"
    front = PROLOGUE.pack(magic, version, 0, len(body), 0)
    return PROLOGUE.pack(magic, version, 0, len(body), checksum(front, body)) + body + rest


def _extents(plain: Plain) -> Iterator[tuple[tuple[int, int, int], tuple[str, int]]]:
    """Every extent, with its section and the byte in there at which it stands."""
    for section, before in _BEFORE.items():
        records, size = plain.get(section), before + _EXTENT.size
        if isinstance(records, bytes) and len(records) % size == 0:
            for at in range(before, len(records), size):
                offset, length, found = _EXTENT.unpack_from(records, at)
                yield (offset, length, found), (section, at)


def _place(rng: random.Random, plain: Plain, cells: list[Any]) -> tuple[int, int]:
    """Where a tensor of a sound header lies in the file, perhaps an expert's, and its bytes."""
    _, block, _, _, _, dense, offset, size, experts = cells
    section, at = ("dense", 0) if dense else ("blocks", block * _EXTENT.size)
    if experts:
        start = plain["experts"].index(struct.pack("<II", block, rng.randrange(experts)))
        section, at = "experts", start + _BEFORE["experts"]
    return _EXTENT.unpack_from(plain[section], at)[0] + offset, size


def resealed(plain: Plain, sound: bytes) -> bytes:
    """A container of these header values and the extents of `sound`, all checksums right.

    A header that has outgrown its place moves the extents, and says so.
    """
    start = round_up(_head_bytes(sound), EXTENT_ALIGNMENT)
    for _ in range(3):  # new offsets may make it longer still
        body = _packed(plain)
        needed = round_up(PROLOGUE.size + len(body), EXTENT_ALIGNMENT)
        if needed <= start:
            break
        sound = sound[:start] + bytes(needed - start) + sound[start:]
        _move_extents(plain, needed - start)
        start = needed
    for (offset, length, _), place in list(_extents(plain)):
        if offset + length <= len(sound):
            found = xxhash.xxh3_64_intdigest(sound[offset : offset + length])
            _put(plain, place, (offset, length, found))
    body = _packed(plain)
    return sealed(body, sound[PROLOGUE.size + len(body) :])


def _move_extents(plain: Plain, distance: int) -> None:
    for (offset, length, found), place in list(_extents(plain)):
        _put(plain, place, ((offset + distance) % (1 << 64), length, found))


def _put(plain: Plain, place: tuple[str, int], extent: tuple[int, int, int]) -> None:
    section, at = place
    records = bytearray(plain[section])
    _EXTENT.pack_into(records, at, *extent)
    plain[section] = bytes(records)


def _packed(plain: Plain) -> bytes:
    return bytes(msgpack.packb(plain, unicode_errors="surrogatepass"))
