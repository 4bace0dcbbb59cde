"""What every order has: a format, strict keys and types, and one wording of every fault on both sides.

The control side validates an order before it changes anything, rigctl again when it reads it. Both use this module, so
a wrong type, an unknown key or a newer format is refused by field path, in the same words.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from reprlib import Repr
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rigctl.errors import RigctlError

Document = dict[str, Any]

_SHORT = Repr()  # a value may be a whole document, nested as deep as Python goes
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 3


SHAPES = {
    r"^[\w.+-]+@[\w.-]+$": "an e-mail address",
    r"^(GET|POST) (/[a-z0-9_-]+)+$": "a method and a path of the engine's API, such as POST /v1/completions",
    r"^(\.|\w[\w.-]*(/\w[\w.-]*)*)$": "a directory inside the source, such as sgl-kernel, or '.'",
    r"^([1-9]\d?%|[1-9]\d*[MG])$": "a share of memory such as 85%, or an amount such as 64G or 500M",
    r"^([\w.@-]+:)?/[\w./-]+$": "a directory, /PATH, or HOST:/PATH, of letters, digits, '.', '_', '-' and '/'",
    r"^3\.\d+$": "a version of Python, such as 3.12",
    r"^[\w.-]+$": "a name of letters, digits, '.', '_' and '-'",
    r"^[\w.-]+/[\w.-]+$": "a repository is OWNER/NAME, such as moonshotai/Kimi-K2.5",
    r"^[0-9]+[%kmg]?$": "a number of bytes, with k, m or g for larger units, or a share of memory such as 50%",
    r"^[0-9a-f]{40}$": "a branch or tag is a moving name: pin the commit (40 hex digits)",
    r"^[0-9a-f]{64}$": "a sha256 is 64 hex digits, 0-9 and a-f",
    r"^[0-9a-fA-F]{40}$": "a git blob id is 40 hex digits",
    r"^[0-9a-fA-F]{64}$": "a sha256 is 64 hex digits",
    r"^[A-Z_][A-Z0-9_]*$": "a variable is upper-case letters, digits and '_', no digit first",
    r"^[A-Za-z_][\w-]*$": "a CMake variable is letters, digits, '_' and '-', a letter or '_' first",
    r"^[A-Za-z_][\w.-]*$": "a user's name is letters, digits, '.', '_' and '-', a letter or '_' first",
    r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$": "the name of a Python module, such as sgl_kernel",
    r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$": "the name of a Python package, such as sgl-kernel",
    r"^[a-z][a-z0-9-]*$": "a flag without its dashes: lower-case letters, digits and '-', a letter first",
    r"^[a-z0-9][a-z0-9+.-]*$": "the name of a Debian package: lower-case letters, digits, '+', '.' and '-'",
    r"^[a-z0-9][a-zA-Z0-9._-]*$": "letters, digits, '.', '_' and '-', a lower-case letter or digit first",
    r"^[a-z0-9][a-z0-9._-]*$": "lower-case letters, digits, '.', '_' and '-', a letter or digit first",
    r"^[a-z0-9][a-z0-9._-]{0,59}$": "at most 60 lower-case letters, digits, '.', '_' and '-', a letter or digit first",
    r"^[a-z0-9][a-z0-9._-]{0,79}$": "at most 80 lower-case letters, digits, '.', '_' and '-', a letter or digit first",
    r"^http://[\w.:\[\]-]+$": "an address of this machine, such as http://127.0.0.1:8000",
    r"^\d+(\.\d+)*$": "a version of numbers and dots, such as 12.8",
    r"^\d{1,2}\.\d$": "a compute capability, such as 12.0",
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$": "a time such as 2026-02-01T12:00:00Z",
    r"^\w[\w.+!-]*\.whl$": "the name of a wheel's file, without a directory",
    r"^\w[\w.-]*$": "letters, digits, '.', '_' and '-', neither '.' nor '-' first",
    r"^files/locks/[\w.-]+(\{python\})?[\w.-]*\.txt$": "a file files/locks/NAME.txt; {python} stands for 311 or 312",
    r"^files/patches(/\w[\w.-]*)+$": "a directory below files/patches",
}
"""Words for people in place of a pattern."""

KINDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "keys and values are expected"),
    "string_type": "a text is expected: in YAML what reads as a number, a date or a truth value needs quotes",
    "union_tag_not_found": "{discriminator} is missing",
    "union_tag_invalid": "{discriminator} is {tag!r}, not one of {expected_tags}",
}
"""Words for people in place of Python's names of types; in braces what pydantic adds."""


class ContractError(RigctlError):
    """A document that is no order of this kind, or one of a newer format: says where, which field, and what to do."""


class Part(BaseModel):
    """A part of an order, or an entry of a catalogue: no unknown keys, no conversion of types, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def validated(cls, document: object, where: str) -> Self:
        """Validate a JSON value. Raises ContractError, naming `where` and the field of each fault."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise ContractError("; ".join(f"{where}: {fault}" for fault in faults(error, cls, document))) from None


class Order(Part):
    """A document that one program writes and the other reads.

    `format` rises with every change that an older reader must not misread. `upgrades` has, for each older format that
    is still readable, the function that makes the next format's document of it. Format 0 has no such number in it.
    """

    FORMAT: ClassVar[int] = 1
    upgrades: ClassVar[Mapping[int, Callable[[Document], Document]]] = {}
    WRITTEN_WHOLE: ClassVar[bool] = False
    """Only programs write it, with every key: a missing one is a fault, also where the model has a default."""

    format: int = 0

    @classmethod
    def parse(cls, document: object, where: str) -> Self:
        """Validate a document. Raises ContractError, naming `where` and the field.

        where: what the reader should look at, such as the path of the file.
        """
        if not isinstance(document, Mapping):
            raise ContractError(f"{where}: a JSON object is expected")
        current = dict(document)
        written = current.get("format", 0)
        if type(written) is not int or written < 0:
            raise ContractError(f"{where}: format: a whole number is expected (got {_SHORT.repr(written)})")
        if written > cls.FORMAT:
            raise ContractError(
                f"{where}: format {written} is newer than this program reads (up to {cls.FORMAT}): "
                "deploy again with the version of kimi-rig that wrote it, or a newer one"
            )
        try:
            for step in range(written, cls.FORMAT):
                if step not in cls.upgrades:
                    raise ContractError(
                        f"{where}: format {step} is of an old version of kimi-rig and no longer read: deploy again"
                    )
                current = {**cls.upgrades[step](current), "format": step + 1}
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ContractError(f"{where}: not an order of format {written} ({error!r}): deploy again") from None
        order = cls.validated(current, where)
        if cls.WRITTEN_WHOLE and (missing := [*gaps(current, order.document())]):
            raise ContractError("; ".join(f"{where}: {path}: is missing" for path in missing))
        return order

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one from a file. Raises ContractError when it cannot be read or is not an order of this kind."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ContractError(f"{path} cannot be read: {error.strerror}") from None
        return cls.parse_text(text, str(path))

    @classmethod
    def parse_text(cls, text: str | bytes, where: str) -> Self:
        """Validate a document in JSON. Raises ContractError."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{where}: not JSON ({error}): deploy again") from None
        return cls.parse(document, where)

    def document(self) -> Document:
        """The order as JSON values, in the format of this version."""
        return {**self.model_dump(mode="json"), "format": self.FORMAT}

    def text(self) -> str:
        return json.dumps(self.document(), indent=1, sort_keys=True) + "\n"


def extended(old: Document, **new: Any) -> Document:
    """A document with further keys, for an upgrade. Raises ValueError where it has one of them: it is no older one."""
    if foreign := sorted(old.keys() & new.keys()):
        raise ValueError(f"{', '.join(foreign)} is of a later format")
    return {**old, **new}


def gaps(written: object, whole: object, path: str = "") -> Iterator[str]:
    """Paths of the keys that a document leaves to the model's defaults."""
    if isinstance(written, Mapping) and isinstance(whole, Mapping):
        for key, value in whole.items():
            here = f"{path}.{key}" if path else key
            if key in written:
                yield from gaps(written[key], value, here)
            else:
                yield here
    elif isinstance(written, list) and isinstance(whole, list):
        for number, pair in enumerate(zip(written, whole, strict=True)):
            yield from gaps(*pair, f"{path}.{number}")


def faults(error: ValidationError, model: type[BaseModel], document: object) -> Iterable[str]:
    """`field.path: what is wrong` for each fault, in words for people."""
    for problem in error.errors(include_url=False):
        path = ".".join(part if part.isprintable() else ascii(part) for part in map(str, place(problem, document)))
        yield f"{path}: {words(problem, keys(model))}" if path else words(problem, keys(model))


def place(problem: ErrorDetails, document: object) -> tuple[str | int, ...]:
    """The keys that lead to a fault, without the tags of unions that pydantic puts between them."""
    found: list[str | int] = []
    here: Any = document
    for part in problem["loc"]:
        key: Any = part
        if (isinstance(here, Mapping) and key in here) or (isinstance(here, list) and isinstance(part, int)):
            here = here[key]
            found.append(part)
    return (*found, problem["loc"][-1]) if problem["type"] == "missing" else tuple(found)


def words(problem: ErrorDetails, known: Iterable[str]) -> str:
    """One fault without its path. known: keys to look for a mistyped one in."""
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        return f"there is no such key{nearest(name, set(known) - {name})}"
    if problem["type"] == "missing":
        return "is missing"
    message = problem["msg"].removeprefix("Value error, ")
    context = problem.get("ctx", {})
    if problem["type"] == "string_pattern_mismatch":
        message = SHAPES.get(context["pattern"], message)
    if problem["type"] in KINDS:
        message = KINDS[problem["type"]].format(**context)
    # A rule about a whole part says itself what is wrong with it.
    whole = problem["type"] == "value_error" and isinstance(problem["input"], dict)
    return message if whole else f"{message} (got {_SHORT.repr(problem['input'])})"


@cache
def keys(model: type[BaseModel]) -> frozenset[str]:
    """The keys of a model and of every model below it."""
    found = set(model.model_fields)
    for definition in model.model_json_schema().get("$defs", {}).values():
        found |= set(definition.get("properties", {}))
    return frozenset(found)


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean "ml_env"?`, or nothing when no known name is like it."""
    found = get_close_matches(name, list(known), n=1)
    return f', did you mean "{found[0]}"?' if found else ""
