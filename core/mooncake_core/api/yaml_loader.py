"""YAML as Kubernetes reads it: no dates, no words that become booleans unseen, no key twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class ManifestLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys and leaves time stamps as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping; a key that comes twice is an error, where PyYAML keeps the last."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} comes twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; one that its tag does not fit is an error with a place, as all others are."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, AttributeError) as error:
            # `!!int abc`, `!!bool maybe`, `!!timestamp soon`, a number of thousands of digits.
            said = f"{str(node.value)[:40]} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from error


_RESOLVED = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ManifestLoader.yaml_implicit_resolvers = _RESOLVED
