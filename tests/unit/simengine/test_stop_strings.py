from mooncake_simulator.engine.answering import StopStrings


def feed(
    stops: list[str], pieces: str, *, keep: bool = False, may_stop: bool = True
) -> tuple[str, str | None]:
    finder = StopStrings(stops, keep=keep)
    out = ""
    for piece in pieces:
        text, stop = finder.push(piece, may_stop=may_stop)
        out += text
        if stop is not None:
            return out, stop
    return out + finder.flush(), None


def test_text_before_the_stop_string_goes_out_and_the_stop_string_does_not() -> None:
    assert feed(["end"], "the end of it") == ("the ", "end")


def test_the_stop_string_goes_out_when_it_was_asked_for() -> None:
    assert feed(["end"], "the end of it", keep=True) == ("the end", "end")


def test_the_beginning_of_a_stop_string_that_does_not_come_is_not_lost() -> None:
    assert feed(["end"], "legend? en") == ("leg", "end")
    assert feed(["endless"], "the end") == ("the end", None)


def test_the_first_of_several_stop_strings_ends_the_text() -> None:
    assert feed(["zz", "b"], "abzz") == ("a", "b")


def test_no_stop_string_ends_the_text_before_enough_tokens_are_there() -> None:
    assert feed(["b"], "abc", may_stop=False) == ("abc", None)
