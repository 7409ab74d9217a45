"""How a byte-pair tokenizer cuts text into words before it merges: one row per name.

Knows patterns and names; a GGUF file carries only the name. Patterns are Oniguruma's (the
`tokenizers` library runs them). A row's patterns are applied in order, each to the pieces that the
one before left; what a pattern does not match stays a piece of its own. The rows give the ids that
llama.cpp gives, also where the models' authors wrote a finer pattern: letters there have no case
outside ASCII, so `\\p{Lu}` and its kin are written `\\p{L}` here.
"""

import re
from dataclasses import dataclass, replace

from jitllm.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Split:
    """What a pre-tokenizer's name stands for."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever its merges would make of it."""
    add_bos: bool = False
    """Whether a prompt begins with BOS where the file does not say."""
    has_bos: bool = True
    """Whether there is a BOS where the file does not say."""
    byte_level: bool = True
    """Words are spelled in GPT-2's printable bytes; otherwise in UTF-8 with spaces as U+2581."""


def find_split(name: str) -> Split:
    """The row called `name`. Raises `UnsupportedModel`, listing all of them."""
    row = SPLITS.get(name)
    if row is None:
        raise UnsupportedModel("pre-tokenizer", name, SPLITS)
    return row


# A pattern is a list of alternatives, the first that matches wins.

_APOSTROPHE = r"'s|'t|'re|'ve|'m|'ll|'d"
_APOSTROPHE_ANY_CASE = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_OTHERS_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_SPACE = r"\s+(?!\S)|\s+"
_ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_PUNCTUATION_WORD = _ASCII_SIGN + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"

_CASED = r"(?:(?=\p{L})[^a-z])"
_UNCASED = r"(?:(?=\p{L})[^A-Z])"


def _cased_word(tail: str) -> str:
    """Words that begin with capitals and go on without: FooBar is two. `tail` may follow one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_CASED}*{_UNCASED}+{tail}|{start}{_CASED}+{_UNCASED}*{tail}"


def _threes(digit: str, start: str) -> str:
    """Groups of three digits, counted from the right; `start` stands before the first of them.

    Only a first group looks at the rest of the number: a long one would take quadratic time.
    """
    first = rf"{start}{digit}{{1,3}}(?=(?:{digit}{{3}})*+(?!{digit}))"
    return rf"(?<={digit})\G{digit}{{3}}|{first}"


_GPT2 = rf"{_APOSTROPHE}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACE}"
_LLAMA3 = rf"{_APOSTROPHE_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_OTHERS}|{_LINES}|{_SPACE}"
_QWEN2 = rf"{_APOSTROPHE_ANY_CASE}|{_WORD}|\p{{N}}|{_OTHERS}|{_LINES}|{_SPACE}"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GROUPED_NUMBER = _threes(r"\p{N}", r"\G\P{N}*+")


def _ranges(code_points: str) -> str:
    """The inside of a character class, from code points and ranges of them in hexadecimal."""
    return re.sub("([0-9a-f]+) ?", r"\\x{\1}", code_points)


_CJK = f"[{_ranges('4e00-9fa5 3040-30ff')}]+"
_CJK_WIDE = rf"[{_ranges('800-9fa5 ac00-d7ff')}&&\S]+"
_EAST_ASIAN = _ranges(
    "e40-eff 1000-109f 1100-11ff 1780-17ff 2f00-2fdf 3040-30ff 3400-4dbf 4e00-9fff 8c48-faff"
    " a9e0-a9ff aa60-aa7f ac00-d7af ff65-ff9f"
)
_CJK_SIGNS = _ranges("2014 2018 2019 201c 201d 2026 3001-303f fe30-fe4f ff01 ff0c ff1a ff1b")
_HAN = _ranges(
    "3400-4dbf 4e00-9fff f900-faff 20000-2a6df 2a700-2b73f 2b740-2b81f 2b820-2ceaf 2ceb0-2ebef"
    " 2f800-2fa1f"
)
_CASED_LETTERS = _ranges(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386"
    " 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba"
    " 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57"
    " 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb"
    " 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d"
    " 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3"
    " a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a"
    " ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df"
    " 1e900-1e943"
)

_gpt2 = Split((_GPT2,))
_llama3 = Split((_LLAMA3,))
_llama3_whole = replace(_llama3, ignore_merges=True, add_bos=True)
_qwen2 = Split((_QWEN2,))
_single_digits = Split((r"\p{N}", _GPT2))
_deepseek3 = Split((r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATION_WORD}[\r\n]*|{_LINES}|{_SPACE}"))
_bailing = Split((rf"{_APOSTROPHE_ANY_CASE}|{_WORD}|\p{{N}}|{_OTHERS}|\s*[\r\n]|{_SPACE}",))
_bloom = Split((_BLOOM,))
_gpt4o = Split(
    (
        rf"{_cased_word(f'(?:{_APOSTROPHE_ANY_CASE})?')}|\p{{N}}{{1,3}}|{_OTHERS_OR_PATH}|{_LINES}"
        rf"|{_SPACE}",
    )
)
_tiny_aya = Split(
    (
        _GROUPED_NUMBER,
        rf"{_MARKED_WORD}(?:{_APOSTROPHE_ANY_CASE})?|\p{{N}}{{1,3}}|{_OTHERS_OR_PATH}|{_LINES}"
        rf"|{_SPACE}",
    )
)

SPLITS: dict[str, Split] = {
    "default": Split(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "llama-bpe": _llama3_whole,
    "llama3": _llama3_whole,
    "llama-v3": _llama3_whole,
    "falcon3": _llama3_whole,
    "falcon-h1": _llama3_whole,
    "pixtral": _llama3_whole,
    "lfm2": _llama3_whole,
    "midm-2.0": _llama3_whole,
    "jina-v5-nano": _llama3_whole,
    "dbrx": _llama3,
    "smaug-bpe": _llama3,
    "chatglm-bpe": replace(_llama3, has_bos=False),
    "glm4": replace(_llama3, has_bos=False, ignore_merges=True),
    "glm5": replace(_llama3, has_bos=False, ignore_merges=True),
    "minicpm5": Split(
        (
            r"\p{N}{1,3}",
            rf"{_APOSTROPHE_ANY_CASE}|{_WORD}|\p{{N}}+|{_OTHERS}|{_LINES}|{_SPACE}",
        ),
        ignore_merges=True,
    ),
    "jais-2": Split(
        (
            rf"{_APOSTROPHE_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_OTHERS}|{_LINES}"
            r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
            r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?[!-/:-~{_ranges('2018-201f 3001-3002 ff01-ff0f ff1a-ff5e')}]+",
            r"(?<!\s)\s+\z",
            _CJK_WIDE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}")),
    "deepseek-v3": _deepseek3,
    "hunyuan-dense": _deepseek3,
    "hy_v4": _deepseek3,
    "joyai-llm": _deepseek3,
    "spark2_5": Split((r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATION_WORD}|[\r\n]|{_SPACE}", r"\p{N}")),
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "stablelm2": _qwen2,
    "megrez": _qwen2,
    "hunyuan": _qwen2,
    "grok-2": _qwen2,
    "solar-open": _qwen2,
    "kormo": _qwen2,
    "f2llmv2": _qwen2,
    "bailingmoe": _bailing,
    "bailingmoe2": _bailing,
    "llada-moe": _bailing,
    "seed-coder": Split(
        (rf"{_APOSTROPHE_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACE}",)
    ),
    "qwen35": Split(
        (
            rf"{_APOSTROPHE_ANY_CASE}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|{_LINES}|{_SPACE}",
        )
    ),
    "laguna": Split((r"[^\n]+|\n+", _QWEN2)),
    "youtu": Split(
        (
            rf"[{_ranges('3131-318e ac00-d7a3')}]+"
            rf"|[{_CJK_SIGNS}]+"
            rf"|[{_ranges('3105-312f')}]+|{_CJK}",
            rf"{_MARKED_WORD}(?:{_APOSTROPHE_ANY_CASE})?|\p{{N}}|{_OTHERS_OR_PATH}|{_LINES}"
            rf"|{_SPACE}",
        ),
        ignore_merges=True,
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "gpt-2": _gpt2,
    "mpt": _gpt2,
    "phi-2": _gpt2,
    "gigachat": _gpt2,
    "jina-de": _gpt2,
    "jina-es": _gpt2,
    "jina-v1-en": _gpt2,
    "jina-v2-de": _gpt2,
    "jina-v2-es": _gpt2,
    "modern-bert": _gpt2,
    "mellum": _gpt2,
    "roberta-bpe": _gpt2,
    "jina-v2-code": _gpt2,
    "olmo": _gpt2,
    "jais": _gpt2,
    "exaone4": _gpt2,
    "trillion": _gpt2,
    "granite-docling": _gpt2,
    "a.x-4.0": _gpt2,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "smollm": _single_digits,
    "codeshell": _single_digits,
    "exaone": _single_digits,
    "minerva-7b": _single_digits,
    "mellum2": _single_digits,
    "sarvam-moe": Split((r"[^\n]+|\n+",), byte_level=False),
    "poro-chat": _bloom,
    "bloom": _bloom,
    "gpt3-finnish": _bloom,
    "viking": Split((_BLOOM, r"\p{N}")),
    "tekken": Split(
        (rf"{_cased_word('')}|\p{{N}}|{_OTHERS_OR_PATH}|{_LINES}|{_SPACE}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "exaone-moe": Split(
        (
            rf"{_APOSTROPHE_ANY_CASE}"
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
            rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACE}",
        )
    ),
    "chameleon": Split(
        (
            r"<sentinel:[0-9]+>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gpt-4o": _gpt4o,
    "llama4": _gpt4o,
    "kanana2": _gpt4o,
    "talkie": _gpt4o,
    "minimax-m2": _gpt4o,
    "tiny_aya": _tiny_aya,
    "cohere2moe": _tiny_aya,
    "superbpe": Split((r"\p{N}+", _threes("[0-9]", "(?<![0-9])"))),
    "kimi-k2": Split(
        (
            rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_APOSTROPHE_ANY_CASE})?"
            rf"|\p{{N}}{{1,3}}|{_OTHERS}|{_LINES}|{_SPACE}",
        )
    ),
    "afmoe": Split(
        (
            _GROUPED_NUMBER,
            f"[{_EAST_ASIAN}]+",
            rf"{_PUNCTUATION_WORD}[\r\n]*|{_LINES}|{_SPACE}",
        )
    ),
}
