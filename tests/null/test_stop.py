from hypothesis import given
from hypothesis import strategies as st

from jitllm.text.stop import StopStrings


def shown(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All that comes out for `pieces`, and the stop string that was found."""
    strings = StopStrings(stops)
    text = "".join(strings.feed(piece) for piece in pieces)
    return text + strings.flush(), strings.matched


def test_text_without_a_stop_string_passes() -> None:
    assert shown([], ["a", "b"]) == ("ab", None)
    assert shown(["x"], ["a", "b"]) == ("ab", None)


def test_a_stop_string_and_what_follows_are_cut() -> None:
    assert shown(["\n\n"], ["one\n\ntwo"]) == ("one", "\n\n")
    assert shown(["END"], ["a E", "N", "D b", "c"]) == ("a ", "END")


def test_what_may_be_the_start_of_a_stop_string_waits() -> None:
    strings = StopStrings(["END"])
    assert strings.feed("a EN") == "a "
    assert strings.feed("C") == "ENC"
    assert strings.feed("E") == ""
    assert strings.flush() == "E"


def test_an_overlapping_start_is_found() -> None:
    assert shown(["aab"], list("aaab")) == ("a", "aab")


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert shown(["ab c", "b"], ["ab c"]) == ("a", "b")
    assert shown(["b", "ab"], ["xab"]) == ("x", "ab")


def test_an_empty_stop_string_is_none() -> None:
    assert shown([""], ["a"]) == ("a", None)


words = st.text("abc", max_size=12)


@given(st.lists(words, max_size=3), words, st.lists(st.integers(0, 12), max_size=4))
def test_pieces_do_not_matter(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = shown(stops, [text])
    assert shown(stops, pieces) == whole == shown(stops, list(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop and stop in text]
    assert whole[0] == text if not ends else text.startswith(whole[0])
    assert (whole[1] is None) == (not ends)
