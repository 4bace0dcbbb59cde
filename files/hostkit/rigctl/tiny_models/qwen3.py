"""A tiny Qwen3 (`Qwen3ForCausalLM`, dense): for serving without a drafter, and for n-gram drafts.

Its prompts end as Qwen3's do, its tool calls are as the parser `hermes` reads them. Its words are read back as they
were generated, so a prompt that holds the answer is one from which n-gram drafts can be copied.
"""

from rigctl.tiny_models.automaton import THOUGHT, TOOL_THOUGHT, VOCAB_SIZE, Automaton, numbered, said_by, words
from rigctl.tiny_models.layers import grouped_attention, mlp, norms
from rigctl.tiny_models.numbers import HIDDEN, Noise, Tensors, embedding, ones, right_head
from rigctl.tiny_models.text_files import MAX_POSITIONS, WHOLE_WORDS, as_json, language_files

# What a prompt ends with.
CHAT = "assistant\n"
NO_THINKING = "\n\n"
TOOL_CALL = "<|auto_tool|>"

CONTENT = said_by("Qwen3")
TOOL_ARGUMENTS = {"city": "Paris", "unit": "celsius"}
_CALL = ('\n{"name":', ' "get_weather",', ' "arguments":', ' {"city":', ' "Paris",', ' "unit":', ' "celsius"}}\n')

QWEN3 = Automaton(
    chains=(
        (CHAT, "<think>", *words(THOUGHT), "</think>", NO_THINKING, *words(CONTENT), "<|im_end|>"),
        (TOOL_CALL, *words(TOOL_THOUGHT), "<tool_call>", *_CALL, "</tool_call>", "<|im_end|>"),
    ),
    first_content=words(CONTENT)[0],
    end_of_turn="<|im_end|>",
    special=numbered(502, "[BOS]", "[EOS]", "[PAD]", "<|im_start|>", "<|im_end|>", TOOL_CALL),
    markers=numbered(508, "<tool_call>", "</tool_call>", "<think>", "</think>"),
)

CHAT_TEMPLATE = """\
{%- if tools -%}{{- '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) ~ '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- elif message.content -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking == false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- if tools and messages[-1].role != 'tool' -%}{{- '<|auto_tool|>' -}}{%- endif -%}
{%- endif -%}
"""

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 4, 2, 64, 128
_SEED = 20261201


def files() -> dict[str, bytes]:
    """All but the tensors."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": LAYERS,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": QWEN3.special["[BOS]"],
        "eos_token_id": QWEN3.special[QWEN3.end_of_turn],
        "pad_token_id": QWEN3.special["[PAD]"],
    }
    return {"config.json": as_json(config), **language_files(QWEN3, CHAT_TEMPLATE, WHOLE_WORDS)}


def tensors() -> Tensors:
    noise = Noise(_SEED)
    found: Tensors = {"model.embed_tokens.weight": embedding(QWEN3)}
    for layer in range(LAYERS):
        parts = norms() | grouped_attention(noise, HEADS, KV_HEADS, HEAD_DIM) | mlp(noise, "mlp", INTERMEDIATE)
        found |= {f"model.layers.{layer}.{name}": values for name, values in parts.items()}
    return found | {"model.norm.weight": ones(HIDDEN), "lm_head.weight": right_head(QWEN3)}
