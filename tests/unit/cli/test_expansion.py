from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncakectl.local.expansion import MountPaths, expand

names = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
segments = st.from_regex(r"[a-z0-9]{1,6}", fullmatch=True)
mount_paths = st.lists(segments, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))


def test_references_expand_as_the_kubelet_does() -> None:
    variables = {"A": "1", "B": "$(A)", "EMPTY": ""}
    for text, wanted in {
        "$(A)": "1",
        "x$(A)y$(A)": "x1y1",
        "$$(A)": "$(A)",
        "$$$(A)": "$1",
        "$$$$(A)": "$$(A)",
        "$(UNKNOWN)": "$(UNKNOWN)",
        "$(A": "$(A",
        "$A": "$A",
        "cost: 5$": "cost: 5$",
        "$(B)": "$(A)",  # values are not expanded again
        "[$(EMPTY)]": "[]",
        "$()": "$()",
    }.items():
        assert expand(text, variables) == wanted


@given(st.text(alphabet=st.characters(exclude_characters="$")), st.dictionaries(names, st.text()))
def test_text_without_a_dollar_stays(text: str, variables: dict[str, str]) -> None:
    assert expand(text, variables) == text


@given(st.text(), st.dictionaries(names, st.text()))
def test_escaped_text_comes_out_as_it_was(text: str, variables: dict[str, str]) -> None:
    assert expand(text.replace("$", "$$"), variables) == text


@given(mount_paths, segments)
def test_paths_below_a_mount_lead_to_its_folder(mount: str, below: str) -> None:
    rewrite = MountPaths({mount: "/LOCAL/x"}).rewrite
    assert rewrite(mount) == "/LOCAL/x"
    assert rewrite(f"{mount}/{below}") == f"/LOCAL/x/{below}"
    assert rewrite(f"ipc://{mount}/{below}") == f"ipc:///LOCAL/x/{below}"
    assert rewrite(f"--flag={mount}") == "--flag=/LOCAL/x"
    assert rewrite(f'{{"dir": "{mount}"}}') == '{"dir": "/LOCAL/x"}'


@given(mount_paths, segments)
def test_paths_that_only_begin_or_end_alike_stay(mount: str, other: str) -> None:
    rewrite = MountPaths({mount: "/LOCAL"}).rewrite
    for text in (mount + other, f"/{other}1{mount}", f"http://host{mount}", f"{mount}.bak"):
        assert rewrite(text) == text


def test_the_deeper_mount_wins() -> None:
    rewrite = MountPaths({"/etc/m": "/A", "/etc/m/keys": "/B"}).rewrite
    assert rewrite("/etc/m/scheduler.json:/etc/m/keys/k") == "/A/scheduler.json:/B/k"
