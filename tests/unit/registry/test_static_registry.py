"""A file that says who is there."""

import json
import os
from pathlib import Path

import pytest

from mooncake_core.config.base import ConfigError
from mooncake_core.registry import Instance, InstanceState, Role, StaticRegistry


def write(path: Path, *records: dict[str, object]) -> None:
    path.write_text(json.dumps(records))
    # A second write in the same tick of the file system's clock must be seen too.
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + len(path.read_bytes()) * 1000))


def record(name: str, **changes: object) -> dict[str, object]:
    return {"id": name, "role": "prefill", "url": f"http://{name}:8000"} | changes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "instances.json"
    write(path, record("b"), record("a", role="decode"))
    return path


async def test_instances_of_the_file_are_listed_by_id(path: Path) -> None:
    a, b = await StaticRegistry(path).instances()
    assert (a.id, a.role, a.epoch, b.id) == ("a", Role.DECODE, 1, "b")


async def test_a_changed_record_begins_a_new_epoch_and_an_unchanged_one_does_not(path: Path) -> None:
    registry = StaticRegistry(path)
    write(path, record("b", url="http://elsewhere:1"), record("a", role="decode"), record("c"))
    a, b, c = await registry.instances()
    assert (a.epoch, b.epoch, c.epoch) == (1, 2, 1)
    assert b.url == "http://elsewhere:1"


async def test_an_epoch_in_the_file_is_taken_as_it_is(path: Path) -> None:
    registry = StaticRegistry(path)
    write(path, record("a", epoch=7))
    assert [i.epoch for i in await registry.instances()] == [7]


async def test_a_change_that_cannot_be_read_leaves_the_last_good_list(path: Path) -> None:
    registry = StaticRegistry(path)
    write(path, record("a", role="waiter"))
    assert [i.id for i in await registry.instances()] == ["a", "b"]
    os.unlink(path)
    assert [i.id for i in await registry.instances()] == ["a", "b"]
    write(path, record("z"))
    assert [i.id for i in await registry.instances()] == ["z"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "instances.json"),
        ('[{"id": "a", "role": "waiter", "url": "u"}]', "waiter"),
        ('[{"id": "a", "role": "decode", "url": "u"}, {"id": "a", "role": "decode", "url": "v"}]', "twice"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_what_is_wrong(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "instances.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        StaticRegistry(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        StaticRegistry(tmp_path / "absent.json")


async def test_marks_outlive_a_change_of_the_file(path: Path) -> None:
    registry = StaticRegistry(path)
    assert await registry.mark("a", InstanceState.DRAINING)
    assert not await registry.mark("nobody", InstanceState.DRAINING)
    write(path, record("a"))
    assert [i.state for i in await registry.instances()] == [InstanceState.DRAINING]


async def test_who_wants_to_register_is_told_where_to_write(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"instances\.json"):
        await StaticRegistry(path).register(Instance(id="x", role=Role.DECODE, url="http://x"))
