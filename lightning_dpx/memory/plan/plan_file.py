"""Plans as text: YAML, one line for each decision, to be read, edited and loaded again.

Lines as they are written here are read by a pattern, 20,000 of them in some tenths of a second; lines that were
edited into another shape by PyYAML, which takes 0.5 ms for each, and whatever is not made of lines as a whole. (The
loader in C knows neither of the refusals below, and crashes on deep nesting.)
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_dpx.errors import name_file
from lightning_dpx.units import MIB

MOST_BYTES = 64 * MIB  # about half a million decisions
_DECISIONS = "decisions:"
_PLAIN = r"[A-Za-z_][A-Za-z0-9_.]*(?: [A-Za-z_][A-Za-z0-9_.]*)*"
# Words that YAML 1.1 takes for truth values or for nothing, in any case of letters.
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
_TEXT = rf"(?:{_PLAIN}|'(?:[^'\n]|'')*')"
_LINE = re.compile(
    rf"  - \{{name: ({_TEXT}), operator: ({_TEXT}), num_bytes: (0|[1-9][0-9]*),"
    rf" seconds: ([0-9]+\.[0-9]+(?:e[-+][0-9]+)?), action: ([a-z ]+)(?:, calls: \[({_TEXT}(?:, {_TEXT})*)?\])?\}}"
)
_TEXTS = re.compile(_TEXT)


class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Data without aliases, which can stand for more than fits anywhere, and without a key given twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise yaml.YAMLError(f"a key is given twice{node.start_mark}")
        return mapping


def format_file(comments: Iterable[str], head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a file.

    Args:
        comments: Its first lines.
        head: Texts, numbers and ``None`` by name.
        rows: For each decision, texts, numbers, ``None`` and tuples of texts by name.

    Raises:
        ValueError: it would be longer than what :func:`read` takes.
    """
    lines = [*(f"# {comment}" for comment in comments)]
    lines += [f"{name}: {_scalar(value)}" for name, value in head.items()]
    # A decision a line, so that a plan can be read, compared by lines and edited by hand.
    written = []
    for row in rows:
        cells = ", ".join(f"{name}: {_scalar(value)}" for name, value in row.items())
        written.append(f"  - {{{cells}}}")
    if written:
        lines += ["", _DECISIONS, *written]
    else:
        lines += ["", f"{_DECISIONS} []"]
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"it would be longer than {MOST_BYTES} bytes")
    return text


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text`` beside the file at ``path`` and renames it, so that there is the old file or the new one."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a device or a pipe, which nothing may replace
        target.write_text(text, encoding="utf-8")
        return
    # In the same folder, because only within a file system a rename replaces a file at once.
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Otherwise the new name may be on the disk before the text is, when the machine goes
            # down.
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o777)
        beside.replace(target)
    except BaseException as error:  # Ctrl-C, too, leaves nothing beside the file
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            name_file(error, path)
        raise


def read(path: str | os.PathLike[str]) -> Any:
    """What the file at ``path`` holds, as PyYAML gives it.

    Raises:
        OSError: there is no such file.
        ValueError: it is too long, or no text.
        yaml.YAMLError: it is not YAML, or what :class:`PlainLoader` refuses.
    """
    with open(path, encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES} bytes")
        text = file.read()
    content = _by_lines(text)
    if content is None:
        return yaml.load(text, PlainLoader)
    return content


def _by_lines(text: str) -> dict[str, Any] | None:
    """What the file holds, if it is a head and lines of decisions; ``None`` if it may be anything else."""
    before, found, after = text.partition(f"\n{_DECISIONS}\n")
    if not found:
        return None
    rows: list[Any] = []
    try:
        head = yaml.load(before, PlainLoader)
        for line in after.splitlines():
            if line.startswith("  - "):
                rows.append(_row(line))
            elif line.strip() and not line.startswith("#"):
                return None  # an edited file may go on in any way that YAML knows
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(head, dict) or "decisions" in head:  # twice: PyYAML is to refuse it
        return None
    return {**head, "decisions": rows}


def _row(line: str) -> Any:
    match = _LINE.fullmatch(line)
    if match is None:
        rows = yaml.load(line, PlainLoader)
        if len(rows) != 1:
            raise ValueError("not one decision in a line")
        return rows[0]
    name, operator, num_bytes, seconds, action, calls = match.groups()
    row: dict[str, Any] = {"name": _text(name), "operator": _text(operator)}
    row |= {"num_bytes": int(num_bytes), "seconds": float(seconds), "action": action}
    if line.endswith("]}"):
        row["calls"] = [_text(call) for call in _TEXTS.findall(calls or "")]
    return row


def _text(scalar: str) -> str:
    if scalar.startswith("'"):
        return scalar[1:-1].replace("''", "'")
    if scalar.lower() in _RESERVED:
        raise ValueError("not a text to YAML")
    return scalar


def _scalar(value: Any) -> str:
    """One value as YAML, in one line."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        text = repr(float(value))  # also of NumPy's
        # YAML 1.1 takes 1e-05 for a text, and 1.0e-05 for a number.
        if "e" in text and "." not in text:
            return text.replace("e", ".0e", 1)
        return text
    return str(int(value))


def _quoted(text: str) -> str:
    if re.fullmatch(_PLAIN, text) and text.lower() not in _RESERVED:
        return text
    if text.isascii() and text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    # Python ends lines at more characters than YAML does, and a decision is one line.
    escaped = ""
    for character in text:
        is_plain = character.isascii() and character.isprintable() and character not in '"\\'
        escaped += character if is_plain else f"\\U{ord(character):08x}"
    return f'"{escaped}"'
