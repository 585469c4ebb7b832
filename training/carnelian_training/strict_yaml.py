"""Strict reading of untrusted YAML: limited aliases, and errors for repeated keys (PyYAML silently takes the last)."""

from collections import Counter
from typing import Any

import yaml

MAX_ALIASED = 100_000
"""The most nodes and characters that all aliases of a document may stand for; nested ones can stand for billions."""

_OTHER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What PyYAML raises beside its own errors: for a date with month 99, `!!int ""`, `!!bool maybe`, "\\U00110000"."""


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._size = self._aliased = 0
        self._sizes: dict[yaml.Node, int] = {}  # the size of each complete node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        is_alias, before = self.check_event(yaml.AliasEvent), self._size
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        assert node is not None
        if not is_alias:
            self._size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            self._sizes[node] = self._size - before
            return node
        if node not in self._sizes:
            found = f"no anchor (&) may hold its own alias (*), but `{event.anchor}` does"
            raise yaml.composer.ComposerError(None, None, found, event.start_mark)
        self._size += self._sizes[node]
        self._aliased += self._sizes[node]
        if self._aliased > MAX_ALIASED:
            found = (
                f"aliases (*) must stand for at most {MAX_ALIASED:,} nodes and characters in all, but stand for more"
            )
            raise yaml.composer.ComposerError(None, None, found, event.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # fails for very many digits, which Python refuses to read only in decimal
            return value
        except _OTHER_ERRORS as error:
            found = f"a value is no {node.tag.rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, found, node.start_mark) from error


class _UniqueKeys(_Loader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here, before construction adds the keys that `<<` merges, which may be overridden.
        node = super().compose_mapping_node(anchor)
        marks = {(key.tag, key.value): key.start_mark for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
        counts = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in counts.items():
            if count > 1:
                found = f"the key `{key[1]}` must come once, but comes {count} times; the last time"
                raise yaml.constructor.ConstructorError(None, None, found, marks[key])
        return node


def load(text: str | bytes, *, unique_keys: bool = True) -> Any:
    """Read a YAML document into plain values.

    Args:
        text: the document.
        unique_keys: whether a repeated key is an error; files of other toolkits may have some.

    Raises:
        yaml.YAMLError: The document does not parse, repeats a key, or has aliases for too much; with the line.
    """
    loader = _UniqueKeys(text) if unique_keys else _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("its sections nest too deep") from error
    except _OTHER_ERRORS as error:
        raise yaml.MarkedYAMLError(None, None, str(error), loader.get_mark()) from error
