"""Questions put to an engine inside its own interpreter: `python -I -B probe_script.py`.

Standard library and the engine only. The request is JSON on standard input: engine ("vllm" or "sglang"),
commands (whole command lines of the engine), features (further ones, with an argument, such as tool_parser:kimi_k2) and
options (true: list every flag with its default). Only the answer comes on standard output: what the engine itself
prints goes to standard error. No GPU is needed or used.
"""

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

Verdict = dict[str, Any]
LONGEST = 600
TARGET = "KimiK25ForConditionalGeneration"
SGLANG_EAGLE3 = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head")
# The smallest configurations that vLLM's own classes accept; sizes carry no meaning.
TEXT = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "target": {
        "architectures": [TARGET],
        "model_type": "kimi_k25",
        "text_config": TEXT,
        "vision_config": {"model_type": "kimi_k25"},
        "media_placeholder_token_id": 505,
        "torch_dtype": "bfloat16",
    },
    "drafter": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 512,
        "draft_vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}


class RefusedError(Exception):
    """A command line that the engine does not take; the message is the engine's."""


def module(name: str) -> Any:
    """An engine's module: typed Any, since no engine is there when this file is checked."""
    return importlib.import_module(name)


def verdict(question: Callable[[], object]) -> Verdict:
    """Ask one question; what it raises is its answer."""
    try:
        answer = question()
    except (Exception, SystemExit) as error:
        return {"ok": False, "detail": f"{type(error).__name__}: {str(error)[:LONGEST]}"}
    return {"ok": bool(answer), "detail": str(answer)[:LONGEST]}


# vLLM


def vllm_architecture(architecture: str) -> tuple[str, str]:
    """Module and class that vLLM registers for an architecture."""
    place, name = module("vllm.model_executor.models.registry")._VLLM_MODELS[architecture][:2]
    return place if place.startswith("vllm.") else f"vllm.model_executor.models.{place}", name


def vllm_eagle3_interface(architecture: str = TARGET) -> bool:
    """Does vLLM itself say that the class can be an EAGLE-3 target?"""
    place, name = vllm_architecture(architecture)
    return bool(module("vllm.model_executor.models.interfaces").supports_eagle3(getattr(module(place), name)))


def vllm_eagle3_admitted() -> str:
    """Build vLLM's own speculative configuration for a Kimi-K2.5 target and a Llama drafter."""
    config = module("vllm.config")
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in CONFIGS.items():
            Path(scratch, name).mkdir()
            Path(scratch, name, "config.json").write_text(json.dumps(content))
        target = config.ModelConfig(model=f"{scratch}/target", tokenizer=f"{scratch}/target", skip_tokenizer_init=True)
        config.SpeculativeConfig(
            method="eagle3",
            model=f"{scratch}/drafter",
            num_speculative_tokens=3,
            target_model_config=target,
            target_parallel_config=config.ParallelConfig(),
        )
    return f"admits {target.hf_text_config.model_type}"


def vllm_tool_parser(name: str = "kimi_k2") -> object:
    return module("vllm.tool_parsers").ToolParserManager.get_tool_parser(name)


def vllm_reasoning_parser(name: str = "kimi_k2") -> object:
    return module("vllm.reasoning").ReasoningParserManager.get_reasoning_parser(name)


VLLM_FEATURES: dict[str, Callable[..., object]] = {
    "architecture": vllm_architecture,
    "eagle3_interface": vllm_eagle3_interface,
    "eagle3_admitted": vllm_eagle3_admitted,
    "tool_parser": vllm_tool_parser,
    "reasoning_parser": vllm_reasoning_parser,
}


def vllm_words(literal: Any) -> list[str]:
    """The words of a Literal, those of literals in it too."""
    return sorted({word for one in get_args(literal) for word in ([one] if isinstance(one, str) else vllm_words(one))})


def vllm_parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, Any]:
    """The `vllm` program's parser, its `serve` part, and the serve command (for its own validation)."""
    platform = module("vllm.platforms").current_platform
    if not platform.device_type:
        # Defaults are made from the device's type. Without a driver there is none; the wheels are for CUDA.
        platform.device_type = "cuda"
    serve = module("vllm.entrypoints.cli.serve").ServeSubcommand()
    parser = module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    return parser, serve.subparser_init(parser.add_subparsers(dest="subparser")), serve


def vllm_parse(flags: Sequence[str]) -> argparse.Namespace:
    """Parse what follows `vllm serve`, and check what the server checks only after minutes."""
    parser, _, serve = vllm_parser()
    parsed: argparse.Namespace = parser.parse_args(["serve", *flags])
    serve.validate(parsed)
    known = module("vllm.config").SpeculativeConfig.__dataclass_fields__
    speculative = parsed.speculative_config or {}
    if unknown := sorted(set(speculative) - set(known)):
        raise RefusedError(f"--speculative-config: unknown keys {', '.join(unknown)}")
    methods = vllm_words(module("vllm.config.speculative").SpeculativeMethod)
    if (method := speculative.get("method")) not in {None, *methods}:
        raise RefusedError(f"--speculative-config: no method {method}; it has {', '.join(methods)}")
    if parsed.tool_call_parser:
        vllm_tool_parser(parsed.tool_call_parser)
    if getattr(parsed, "reasoning_parser", None):
        vllm_reasoning_parser(parsed.reasoning_parser)
    return parsed


# SGLang


class KernelStandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for sgl_kernel, whose library needs the driver's libcuda merely to be imported."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> object:
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock(name=name)

        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def sglang_module(architecture: str) -> str:
    """Name of the module that registers an architecture, by its source: importing all takes minutes and may fail."""
    folder = Path(module("sglang").__file__).parent / "srt" / "models"
    word = re.compile(rf"^EntryClass\b[^=\n]*=[^\n]*(\[[^\]]*)?\b{re.escape(architecture)}\b", re.MULTILINE)
    for path in sorted(folder.rglob("*.py")):
        if word.search(path.read_text(errors="replace")):
            return ".".join(("sglang.srt.models", *path.relative_to(folder).with_suffix("").parts))
    raise RefusedError(f"no module registers {architecture}")


def sglang_model_class(architecture: str) -> tuple[type, str]:
    """SGLang's class of an architecture, and a note on how it was imported."""
    name = sglang_module(architecture)
    try:
        return getattr(module(name), architecture), "imported"
    except ImportError as error:
        if "libcuda" not in str(error):
            raise
    for loaded in [each for each in sys.modules if each.split(".")[0] in ("sgl_kernel", "sglang")]:
        del sys.modules[loaded]
    sys.meta_path.insert(0, KernelStandIn())
    return getattr(module(name), architecture), "imported with a stand-in for sgl_kernel: no driver here"


def sglang_eagle3_interface(architecture: str = TARGET) -> str:
    """Does the class have what the model runner and the draft worker call on an EAGLE-3 target?"""
    model_class, note = sglang_model_class(architecture)
    if missing := [name for name in SGLANG_EAGLE3 if not callable(getattr(model_class, name, None))]:
        raise RefusedError(f"{architecture} lacks {', '.join(missing)} ({note})")
    return note


def sglang_eagle3_admitted() -> str:
    """Does the server's parser know the algorithm?"""
    parsed = sglang_parse(["--model-path", "x", "--speculative-algorithm", "EAGLE3"])
    return f"admits {parsed.speculative_algorithm}"


def sglang_tool_parser(name: str = "kimi_k2") -> object:
    return module("sglang.srt.function_call.function_call_parser").FunctionCallParser.ToolCallParserEnum[name]


def sglang_reasoning_parser(name: str = "kimi_k2") -> object:
    return module("sglang.srt.parser.reasoning_parser").ReasoningParser.DetectorMap[name]


SGLANG_FEATURES: dict[str, Callable[..., object]] = {
    "architecture": sglang_module,
    "eagle3_admitted": sglang_eagle3_admitted,
    "tool_parser": sglang_tool_parser,
    "reasoning_parser": sglang_reasoning_parser,
    # Last: it may have to import the engine again.
    "eagle3_interface": sglang_eagle3_interface,
}
ALWAYS = ("eagle3_interface", "eagle3_admitted", "tool_parser", "reasoning_parser")
"""Asked of every release, without an argument: of Kimi-K2.5."""


def sglang_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang")
    module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def sglang_parse(flags: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, and check the algorithm of speculation where the parser takes any text (0.5.16 on)."""
    parser = sglang_parser()
    parsed = parser.parse_args(list(flags))
    word = getattr(parsed, "speculative_algorithm", None)
    anything = any(action.dest == "speculative_algorithm" and action.choices is None for action in parser._actions)
    if word is not None and anything:
        with contextlib.suppress(ImportError):  # its parser was all that could be asked
            module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string(word)
    return parsed


# Either


def flags_of(engine: str, argv: Sequence[str]) -> list[str]:
    """The flags in an engine's command, whichever of its ways to start it is used."""
    starts = {
        "vllm": ("vllm.entrypoints.openai.api_server", "serve"),
        "sglang": ("sglang.launch_server", "serve"),
    }
    for position, word in enumerate(argv[:4]):
        if word in starts[engine]:
            return list(argv[position + 1 :])
    raise RefusedError(f"not a command that starts {engine}: {' '.join(argv[:4])}")


def parse_command(engine: str, argv: Sequence[str]) -> Verdict:
    """The engine's verdict on one command line; argparse's own message when it refuses."""
    errors = io.StringIO()
    refused = ""
    try:
        with contextlib.redirect_stderr(errors):
            (vllm_parse if engine == "vllm" else sglang_parse)(flags_of(engine, argv))
    except SystemExit:
        refused = errors.getvalue().strip().rpartition("error: ")[2] or "it exits"
    except Exception as error:
        refused = str(error) or type(error).__name__
    return {"argv": list(argv), "ok": not refused, "detail": refused[:LONGEST]}


def options_of(engine: str) -> Iterator[tuple[str, str]]:
    """Every flag of the server with its default, for comparing releases."""
    parser = vllm_parser()[1] if engine == "vllm" else sglang_parser()
    for action in parser._actions:
        for flag in action.option_strings:
            yield flag, repr(action.default)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request: version, commands and features as verdicts, options."""
    engine: str = request["engine"]
    result: dict[str, Any] = {"engine": engine, "version": module(engine).__version__}
    if request.get("commands"):
        result["commands"] = [parse_command(engine, argv) for argv in request["commands"]]
    if request.get("options"):
        result["options"] = dict(options_of(engine))
    table = VLLM_FEATURES if engine == "vllm" else SGLANG_FEATURES
    further = sorted(feature for feature in request.get("features", ()) if ":" in feature)
    result["features"] = {}
    for name, question in table.items():
        for feature in [*([name] if name in ALWAYS else []), *(one for one in further if one.startswith(f"{name}:"))]:
            arguments = [feature.partition(":")[2]] if ":" in feature else []
            result["features"][feature] = verdict(partial(question, *arguments))
    return result


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        answers.write(json.dumps(answer(json.load(sys.stdin))))
