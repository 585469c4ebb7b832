"""YAML in which a key may come once: PyYAML lets the last of several equal keys win without a word."""

from collections import Counter
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, for construction puts what `<<` merges among the keys, where it may be overridden.
        node = super().compose_mapping_node(anchor)
        marks = {(key.tag, key.value): key.start_mark for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
        counts = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in counts.items():
            if count > 1:
                found = f"the key `{key[1]}` must come once, but comes {count} times; the last time"
                raise yaml.constructor.ConstructorError(None, None, found, marks[key])
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError) as error:  # of a date with a month 99, of `!!int x`
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def load(text: str) -> Any:
    """Plain values out of YAML.

    Raises:
        yaml.YAMLError: It does not parse, or has a key twice; with the line.
    """
    return yaml.load(text, _Loader)
