"""The JSON files and the chat template that lie beside the tiny Kimi-K2.5's tensors."""

from typing import Any

from rigctl.tiny_models import kimi_drafter, kimi_target
from rigctl.tiny_models.automaton import VOCAB_SIZE, Automaton
from rigctl.tiny_models.kimi import KIMI, MEDIA_PAD
from rigctl.tiny_models.numbers import HIDDEN
from rigctl.tiny_models.text_files import BYTE_LEVEL, MAX_POSITIONS, as_json, language_files

_BOS, _EOS, _PAD = (KIMI.special[name] for name in ("[BOS]", "[EOS]", "[PAD]"))
_END_OF_TURN = KIMI.special[KIMI.end_of_turn]

# Present as in the real model, without weights: engines serve the language model only.
_VISION: dict[str, Any] = {
    "model_type": "kimi_k25",
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 64,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": HIDDEN,
    "video_attn_type": "spatial_temporal",
}

_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": 16384,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "sample_fps": 2.0,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    },
}

# Turns as Kimi-K2 writes them. The last token decides what the target does: answer, think first, or call a
# tool (not again once the tool has returned).
CHAT_TEMPLATE = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|im_user|>user<|im_middle|>
{%- elif message.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
{%- else -%}<|im_system|>{{ message.role }}<|im_middle|>
{%- endif -%}
{%- if message.role == 'tool' -%}{{ 'result of ' ~ (message.tool_call_id or '') ~ ': ' }}{%- endif -%}
{%- if message.content is string -%}{{ message.content }}
{%- elif message.content -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}<|media_begin|><|media_pad|><|media_end|>
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message.tool_calls -%}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}
<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking == false -%}<think></think>{%- endif -%}
{%- if tools and messages[-1].role != 'tool' -%}<|auto_tool|>{%- endif -%}
{%- endif -%}
"""


# SGLang builds a multimodal model's processor even for text; the real checkpoint brings one as remote code. This one
# knows the tokenizer and the numbers of preprocessor_config.json, and takes no image.
PROCESSOR_FILE = "processing_tiny_kimi.py"
PROCESSOR = '''\
"""The tiny Kimi-K2.5's processor: tokenizer and settings. It takes text only."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast


class MediaProcessor:
    def __init__(self, media_proc_cfg):
        self.media_proc_cfg = media_proc_cfg


class TinyKimiProcessor:
    def __init__(self, tokenizer, media_proc_cfg):
        self.tokenizer = tokenizer
        self.image_processor = self.media_processor = MediaProcessor(media_proc_cfg)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        cls._auto_class = auto_class

    @classmethod
    def from_pretrained(cls, path, **_):
        settings = json.loads(Path(path, "preprocessor_config.json").read_text(encoding="utf-8"))
        return cls(PreTrainedTokenizerFast.from_pretrained(path), settings["media_proc_cfg"])
'''


def processor_files() -> dict[str, bytes]:
    """A processor as remote code, and the settings that name it."""
    named = {"auto_map": {"AutoProcessor": f"{PROCESSOR_FILE.removesuffix('.py')}.TinyKimiProcessor"}}
    settings = as_json({**_PREPROCESSOR, **named})
    return {"preprocessor_config.json": settings, PROCESSOR_FILE: PROCESSOR.encode()}


def target_files(
    shape: kimi_target.Shape = kimi_target.SMALL, automaton: Automaton = KIMI, template: str = CHAT_TEMPLATE
) -> dict[str, bytes]:
    return {
        "config.json": as_json(_target_config(shape)),
        "preprocessor_config.json": as_json(_PREPROCESSOR),
        **language_files(automaton, template, BYTE_LEVEL),
    }


def drafter_files(
    draft_vocab: int, aux_layers: tuple[int, ...] | None = None, heads: int = kimi_drafter.HEADS
) -> dict[str, bytes]:
    """A drafter's config.json; `aux_layers` None leaves the choice to the engine."""
    return {"config.json": as_json(_drafter_config(draft_vocab, aux_layers, heads))}


def _target_config(shape: kimi_target.Shape) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        "ignore_index": -100,
        "media_placeholder_token_id": KIMI.special[MEDIA_PAD],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_unified_vision_chunk": True,
        "text_config": _text_config(shape),
        "vision_config": _VISION,
    }


def _text_config(shape: kimi_target.Shape) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": kimi_target.LAYERS,
        "first_k_dense_replace": kimi_target.DENSE_LAYERS,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.moe_intermediate,
        "moe_layer_freq": 1,
        "n_routed_experts": shape.routed_experts,
        "n_shared_experts": kimi_target.SHARED_EXPERTS,
        "num_experts_per_tok": kimi_target.EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": _BOS,
        "eos_token_id": _END_OF_TURN,
        "pad_token_id": _PAD,
    }


def _drafter_config(draft_vocab: int, aux_layers: tuple[int, ...] | None, heads: int) -> dict[str, Any]:
    chosen = {"eagle_aux_hidden_state_layer_ids": list(aux_layers)} if aux_layers else {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": draft_vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": kimi_drafter.INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": kimi_drafter.HEAD_DIM,
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        **chosen,
    }
