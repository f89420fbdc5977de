"""From what is written, in TOML or on the command line, to the type that a field declares.

Both readers raise ValueError with what was expected and, where it can be guessed, the fix; the
caller knows the key and puts it in front.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtitan_lc.config.token_count import TOKENS, parse_token_count

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Kind:
    """What a field holds. `base` is bool, int, tokens, float, str, choice or list (of str).

    choices: the words of a choice; of another base, words that may stand instead of a value ("auto").
    """

    base: str
    choices: tuple[str, ...] = ()
    optional: bool = False

    @property
    def expected(self) -> str:
        """The words that finish the sentence "expected ..."."""
        words = [f'"{choice}"' for choice in self.choices]
        if self.base == "choice":
            return "one of " + ", ".join(words)
        value = {
            "bool": "true or false",
            "int": "an integer",
            "tokens": 'a number of tokens (an integer, or "128K", "5M")',
            "float": "a number",
            "str": "a string",
            "list": "a list of strings",
        }[self.base]
        return " or ".join([value, *words])


def kind_of(annotation: Any) -> Kind:
    """The Kind of a field's annotation; TypeError for one that no TOML value can fill."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        kinds = sorted((kind_of(one) for one in inner), key=lambda kind: kind.base == "choice")
        if len(kinds) == 1:
            return Kind(kinds[0].base, kinds[0].choices, optional=True)
        if [kind.base == "choice" for kind in kinds] == [False, True] and len(inner) == len(
            arguments
        ):
            return Kind(kinds[0].base, kinds[1].choices)
    if origin is Annotated and TOKENS in arguments[1:]:
        return Kind("tokens")
    if origin is Literal:
        return Kind("choice", choices=arguments)
    if annotation == list[str]:
        return Kind("list")
    if annotation in (bool, int, float, str):
        return Kind(annotation.__name__)
    raise TypeError(f"no rule reads a value of type {annotation!r}")


def from_text(kind: Kind, text: str) -> Any:
    """The value of a command-line word; "none" gives None where the field may be empty."""
    if kind.optional and text.lower() == "none":
        return None
    if kind.base != "choice" and text in kind.choices:
        return text
    if kind.base == "bool":
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError(f"expected {kind.expected}")
    if kind.base == "list":
        return [item.strip() for item in text.split(",") if item.strip()]
    if kind.base == "choice":
        if text not in kind.choices:
            raise ValueError(f"expected {kind.expected}")
        return text
    if kind.base == "str":
        return text
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "tokens": parse_token_count,
    }
    try:
        return readers[kind.base](text)
    except ValueError:
        raise ValueError(f"expected {kind.expected}") from None


def from_toml(kind: Kind, value: Any) -> Any:
    """The value of a parsed TOML item. An integer may stand for a float; nothing else bends."""
    if kind.base != "choice" and value in kind.choices:
        return value
    if kind.base == "tokens" and isinstance(value, str) and value.strip()[-1:].isalpha():
        return parse_token_count(value)
    if kind.base == "float" and type(value) in (int, float):
        return float(value)
    if kind.base == "list" and isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return value
    elif kind.base == "choice":
        if value in kind.choices:
            return value
    # type() and not isinstance(): True is an int to Python, and never what was meant here.
    elif type(value) is {"bool": bool, "int": int, "tokens": int, "str": str}.get(kind.base):
        return value
    got = "" if kind.base == "choice" and isinstance(value, str) else f", got {_article(value)}"
    raise ValueError(f"expected {kind.expected}{got}{_fix(kind, value)}")


def toml_item(value: Any) -> str:
    """`value` as TOML writes it: strings quoted and escaped, booleans in lower case."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(toml_item(item) for item in value) + "]"
    return repr(value) if isinstance(value, (int, float)) else str(value)


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x20 or ord(letter) == 0x7F else letter


def _article(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    names |= {list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


def _fix(kind: Kind, value: Any) -> str:
    if isinstance(value, str) and kind.base in ("bool", "int", "tokens", "float"):
        try:
            meant = from_text(kind, value)
        except ValueError:
            return ""
        shown = value if kind.base == "float" else toml_item(meant)
        return f"; drop the quotes: {shown}"
    if isinstance(value, float) and kind.base in ("int", "tokens") and value.is_integer():
        return f"; write {int(value)}"
    if kind.base == "list" and isinstance(value, str):
        return f"; write {toml_item(from_text(kind, value))}"
    return ""
