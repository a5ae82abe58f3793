"""YAML files of flags. Each value is read as the text that is in the file, as if it were on the command line.

YAML's own types would change values: 1:30 is 90, 010 is 8, `no` is False, and 2024-02-30 is an error.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from hvd_bert.config.settings import FLAGS
from hvd_bert.config.values import shortened
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import MAX_YAML_BYTES, read_text

_TAG = "tag:yaml.org,2002:"


def read(name: str, path: Path) -> dict[str, str | list[str]]:
    """The flags of a file with their values; null leaves a flag out. `name`: of the file, for messages.

    Raises FileNotFoundError and UserError.
    """
    try:
        root = yaml.compose(read_text(path, MAX_YAML_BYTES), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--config {name}: cannot be read as YAML: {reason}") from None
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    if not pairs or not all(isinstance(key, yaml.ScalarNode) for key, _ in pairs):
        raise UserError(f"--config {name}: must be lines of `flag: value`.")
    values: dict[str, str | list[str]] = {}
    lines: dict[str, int] = {}
    for key, value in pairs:
        flag, line = key.value, key.start_mark.line + 1
        if flag not in FLAGS:
            raise UserError(f"--config {name}: unknown key '{shortened(flag)}'{hint(flag, '')}")
        if flag in lines:
            raise UserError(f"--config {name}: '{flag}' is given twice, in lines {lines[flag]} and {line}. Remove one.")
        lines[flag] = line
        text = _value(name, flag, value)
        if text is not None:
            values[flag] = text
    return values


def _value(name: str, flag: str, node: yaml.Node) -> str | list[str] | None:
    """A value as the command line spells it; None for null."""
    if FLAGS[flag].several and isinstance(node, yaml.SequenceNode):
        return [str(_value(name, flag, part)) for part in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"--config {name}: '{flag}' must be a single value, not a list or a mapping.")
    default, text = FLAGS[flag].default, str(node.value)
    if node.tag == _TAG + "null":
        return None
    if node.tag == _TAG + "bool" and isinstance(default, bool):  # on and off, too
        return str(yaml.SafeLoader.bool_values[text.lower()])
    if node.tag == _TAG + "float" and isinstance(default, float):
        return text.replace(".inf", "inf")
    return text


def hint(name: str, prefix: str) -> str:
    """The end of a message about an unknown flag."""
    close = difflib.get_close_matches(name.replace("-", "_"), FLAGS, n=1)
    return f": did you mean {prefix}{close[0]}?" if close else "."
