"""A manifest with other numbers of instances, everything else as it was written, comments too."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from mooncakectl.plan.search import Size


def with_sizes(text: str, size: Size) -> str:
    """The text of a manifest with so many replicas in its prefill pool and in its decode pool.

    Args:
        text: YAML that is a valid manifest with one MooncakeCluster, which has one pool of each kind.
        size: what to write.

    Raises:
        ValueError: a number is shared through a YAML anchor: changed here, it would change elsewhere too.
    """
    edits: list[tuple[int, int, str]] = []
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        if _text(_value(document, "kind")) != "MooncakeCluster":
            continue
        spec = _value(document, "spec")
        for field, count in (("prefillPools", size.prefill), ("decodePools", size.decode)):
            pools = _value(spec, field)
            assert isinstance(pools, yaml.SequenceNode)
            edit = _edit(pools.value[0], count)
            shared = any(edit[:2] == other[:2] for other in edits)
            if shared or text[edit[0] : edit[1]].startswith("&"):
                line = text.count("\n", 0, edit[0]) + 1
                raise ValueError(
                    f"line {line}: replicas of spec.{field} are shared through a YAML anchor, and a plan "
                    "gives each pool its own number: write the number in each pool"
                )
            edits.append(edit)
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _edit(pool: yaml.Node, count: int) -> tuple[int, int, str]:
    """Where to write what, to give a pool so many replicas."""
    replicas = _value(pool, "replicas")
    if replicas is not None:
        return replicas.start_mark.index, replicas.end_mark.index, str(count)
    assert isinstance(pool, yaml.MappingNode)
    first = pool.value[0][0].start_mark
    if pool.flow_style:
        return first.index, first.index, f"replicas: {count}, "
    return first.index, first.index, f"replicas: {count}\n{' ' * first.column}"


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    return next((value for name, value in _pairs(node) if _text(name) == key), None)


def _pairs(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from node.value


def _text(node: yaml.Node | None) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None
