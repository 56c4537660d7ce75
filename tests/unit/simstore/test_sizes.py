import pytest

from mooncake_simulator.store.sizes import SizeError, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64 << 20), ("80 gb", 80 << 30), ("1.5GiB", 3 << 29), ("4096", 4096), (7, 7), ("2T", 2 << 40)],
)
def test_sizes_are_read_as_mooncake_writes_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "3 parsecs"])
def test_other_text_is_refused_with_the_form_to_write(text: str) -> None:
    with pytest.raises(SizeError, match="write bytes, or a number with KB, MB, GB or TB"):
        parse_size(text)
