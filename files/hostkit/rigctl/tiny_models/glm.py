"""A tiny GLM-4.5 (`Glm4MoeForCausalLM`) with a head of its own that drafts (MTP).

The head sees the embedding of the last token and the target's hidden state, side by side, through `eh_proj`. Here that
is [P, 0], and the head's layer adds nothing, so what is drafted after a token is what the target says after the token
to which P sends it. Rows of a Hadamard matrix are orthogonal, so P, a sum of their products, sends each to exactly one;
its entries are whole 256ths of at most 1, which bf16 holds exactly.
"""

import numpy as np

from rigctl.tiny_models.automaton import THOUGHT, TOOL_THOUGHT, VOCAB_SIZE, Automaton, Drafter, numbered, said_by, words
from rigctl.tiny_models.layers import experts, grouped_attention, mlp, norms
from rigctl.tiny_models.numbers import (
    HIDDEN,
    SHARED_ROW,
    Array,
    Noise,
    Tensors,
    embedding,
    hadamard,
    ones,
    right_head,
    zeros,
)
from rigctl.tiny_models.text_files import MAX_POSITIONS, WHOLE_WORDS, as_json, language_files

# What a prompt ends with.
CHAT = "<|assistant|>"
NO_THINKING = "</think>"
TOOL_CALL = "<|auto_tool|>"

CONTENT = said_by("GLM")
# A token has one successor, and a second argument would need the markers again.
TOOL_ARGUMENTS = {"city": "Paris"}
_CALL = ("get_weather", "<arg_key>", "city", "</arg_key>", "<arg_value>", "Paris", "</arg_value>")

GLM = Automaton(
    chains=(
        (CHAT, "<think>", *words(THOUGHT), NO_THINKING, *words(CONTENT), "<|user|>"),
        (TOOL_CALL, *words(TOOL_THOUGHT), "<tool_call>", *_CALL, "</tool_call>", "<|user|>"),
    ),
    first_content=words(CONTENT)[0],
    end_of_turn="<|user|>",
    special=numbered(
        494, "[BOS]", "[EOS]", "[PAD]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", CHAT, "<|observation|>", TOOL_CALL
    ),
    markers=numbered(
        504,
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    half_seed=327,
)

CHAT_TEMPLATE = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{- '<|system|>\\n' ~ (tools | tojson) -}}{%- endif -%}
{%- for message in messages -%}
{{- ('<|observation|>' if message.role == 'tool' else '<|' ~ message.role ~ '|>') ~ '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- elif message.content -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' ~ call.function.name -}}
{%- if call.function.arguments is mapping -%}
{%- for name, value in call.function.arguments.items() -%}
{{- '<arg_key>' ~ name ~ '</arg_key><arg_value>' ~ value ~ '</arg_value>' -}}
{%- endfor -%}
{%- endif -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and enable_thinking == false -%}{{- '<think></think>' -}}{%- endif -%}
{%- if tools and messages[-1].role != 'tool' -%}{{- '<|auto_tool|>' -}}{%- endif -%}
{%- endif -%}
"""

LAYERS, DENSE_LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 3, 1, 4, 2, 64, 128
EXPERTS, EXPERTS_PER_TOKEN, SHARED_EXPERTS, EXPERT_WIDTH = 4, 2, 1, 64
_SEED = 20261202


def files() -> dict[str, bytes]:
    """All but the tensors."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": DENSE_LAYERS,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": SHARED_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": GLM.special["[BOS]"],
        "eos_token_id": [GLM.special["[EOS]"], GLM.special[GLM.end_of_turn], GLM.special["<|observation|>"]],
        "pad_token_id": GLM.special["[PAD]"],
    }
    return {"config.json": as_json(config), **language_files(GLM, CHAT_TEMPLATE, WHOLE_WORDS)}


def tensors(drafter: Drafter) -> Tensors:
    """The target, and as its last layer a head that drafts `GLM.drafted(drafter)`."""
    noise = Noise(_SEED)
    table, output = embedding(GLM), right_head(GLM)
    found: Tensors = {"model.embed_tokens.weight": table}
    for layer in range(LAYERS + 1):
        parts = norms() | grouped_attention(noise, HEADS, KV_HEADS, HEAD_DIM)
        dense = layer < DENSE_LAYERS
        parts |= mlp(noise, "mlp", INTERMEDIATE) if dense else experts(noise, EXPERTS, EXPERT_WIDTH, SHARED_EXPERTS)
        found |= {f"model.layers.{layer}.{name}": values for name, values in parts.items()}
    head = {
        "embed_tokens.weight": table,
        "enorm.weight": ones(HIDDEN),
        "hnorm.weight": ones(HIDDEN),
        "eh_proj.weight": np.concatenate([sent_by(drafter), zeros(HIDDEN, HIDDEN)], axis=1),
        "shared_head.norm.weight": ones(HIDDEN),
        "shared_head.head.weight": output,
    }
    found |= {f"model.layers.{LAYERS}.{name}": values for name, values in head.items()}
    return found | {"model.norm.weight": ones(HIDDEN), "lm_head.weight": output}


def sent_by(drafter: Drafter) -> Array:
    """P: the embedding of each token to that of one that the target follows with what this drafter proposes."""
    rows, proposals = hadamard(), GLM.drafted(drafter)
    row_of = {token: number for number, token in enumerate(GLM.states)}
    before = {after: token for token, after in GLM.following.items()}
    sent = np.arange(HIDDEN)
    for token, proposal in proposals.items():
        sent[row_of[token]] = row_of[before[proposal]]
    # After a token of no chain as after the end of a turn: both lead to the answer.
    sent[SHARED_ROW] = sent[row_of[GLM.end_of_turn]]
    return (rows[sent].T @ rows / HIDDEN).astype(np.float32)
