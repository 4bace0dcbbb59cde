"""Pages of docs/reference/ that say what the code says: keys of the catalogues, commands of kimi-rig and rigctl."""

import argparse
import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import click
from pydantic import BaseModel

from rig.__main__ import VERBS, kimi_rig
from rig.catalog.entries import Checkpoint, Configuration, Family, Release
from rigctl import cli
from rigctl.contract.order import Part

HEAD = "Written by `make schemas` from the code; `make check` refuses a page that differs from it.\n"
CATALOGUES: Mapping[str, type[BaseModel]] = {
    "serving.yaml": Configuration,
    "families.yaml": Family,
    "checkpoints.yaml": Checkpoint,
    "releases.yaml": Release,
}
BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
WORDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}


def pages() -> dict[str, str]:
    """File name -> page."""
    return {"keys.md": keys_page(), "commands.md": commands_page()}


# -- keys -------------------------------------------------------------------------------------------------------------


def keys_page() -> str:
    """Every key of every catalogue; parts that several keys have, once."""
    text = f"# Keys of the catalogues\n\n{HEAD}"
    parts: dict[str, dict[str, Any]] = {}
    for file, model in CATALOGUES.items():
        schema = model.model_json_schema()
        parts |= {name: part for name, part in schema.get("$defs", {}).items() if "properties" in part}
        text += f"\n## {file}\n\n{_table(model, schema)}"
    for name, part in sorted(parts.items()):
        text += f"\n## {name}\n\n{_table(_model(name, part), part)}"
    return text


def _model(name: str, schema: Mapping[str, Any]) -> type[BaseModel]:
    """The model of a part of a schema."""
    waiting = BaseModel.__subclasses__()
    for one in waiting:
        if one.__name__ == name and one.model_fields.keys() == schema["properties"].keys():
            return one
        waiting += one.__subclasses__()
    raise LookupError(name)


def _table(model: type[BaseModel], schema: Mapping[str, Any]) -> str:
    said = {name: text for one in reversed(model.__mro__) if issubclass(one, Part) for name, text in _said(one)}
    text = f"{' '.join(str(schema['description']).split())}\n\n| key | value | default | meaning |\n|---|---|---|---|\n"
    for name, key in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else _default(key.get("default"))
        text += f"| `{name}` | {_kind(key)} | {default} | {said.get(name, '')} |\n"
    return text


def _said(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Fields of a class and the docstrings that stand below them."""
    [body] = [
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(model))).body
        if isinstance(node, ast.ClassDef)
    ]
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str() as text)):
                yield name, " ".join(text.split()).replace("|", "\\|")


def _kind(schema: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(one) for one in several if one.get("type") != "null"))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"mapping to {_kind(inner)}" if isinstance(inner, Mapping) else "mapping"
    bounds = [words.format(schema[key]) for key, words in BOUNDS.items() if key in schema]
    return " ".join([WORDS.get(schema.get("type", ""), "anything"), *bounds])


def _default(value: Any) -> str:
    if value is None or isinstance(value, Mapping) or value in ("", []):
        return ""
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


# -- commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """The help of every command of both programs."""
    context = click.Context(kimi_rig, info_name="kimi-rig", **{**kimi_rig.context_settings, "terminal_width": 100})
    text = f"# Commands\n\n{HEAD}\n## kimi-rig: where you type\n\n```\n{kimi_rig.get_help(context)}\n```\n"
    for name in [name for verbs in VERBS.values() for name in verbs]:
        text += "".join(_help(context, name, kimi_rig.get_command(context, name)))
    text += "\n## rigctl: on a host\n\n| command | does |\n|---|---|\n"
    return text + "".join(f"| `{line}` | {does} |\n" for line, does in _lines("rigctl", cli.parser(cli.MODULES)))


def _help(above: click.Context, name: str, command: click.Command | None) -> Iterator[str]:
    assert command is not None  # noqa: S101  # the group has listed it
    context = click.Context(command, parent=above, info_name=name)
    yield f"\n### {context.command_path}\n\n```\n{command.get_help(context)}\n```\n"
    group = command if isinstance(command, click.Group) else click.Group()
    for inner in group.list_commands(context):
        yield from _help(context, inner, group.get_command(context, inner))


def _lines(name: str, parser: argparse.ArgumentParser, does: str = "") -> Iterator[tuple[str, str]]:
    """Each subcommand with its arguments, and what it does; not by argparse's own help, which differs by Python."""
    words, inner = [name], False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = True
            helps = {one.dest: one.help for one in action._choices_actions}
            for sub, below in action.choices.items():
                yield from _lines(f"{name} {sub}", below, helps.get(sub) or "an older name of the one above")
        elif not isinstance(action, argparse._HelpAction):
            value = str(action.metavar or action.dest).upper() if action.nargs != 0 else ""
            word = " ".join([*action.option_strings[-1:], *([value] if value else [])])
            needed = action.required and action.nargs != "*"
            words.append(word if needed else f"[{word}]")
    if not inner:
        yield " ".join(words).replace("|", "\\|"), does
