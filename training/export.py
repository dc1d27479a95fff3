"""Conversion between the training model and a Hugging Face Llama folder."""

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.config import BEGIN, END, ModelConfig
from training.model import Block, Decoder

_BEGIN_ID, _END_ID, _DOCUMENT_ID = 0, 1, 2
"""Special tokens in the order of training/tokenizer.py."""
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")


def _block_state(block: Block, prefix: str) -> dict[str, Tensor]:
    query_key_value = torch.split(block.qkv.weight, block.qkv_cuts)
    gate_up = block.gate_up.weight.chunk(2)
    state = {
        f"{prefix}self_attn.{name}.weight": part
        for name, part in zip(_ATTENTION, query_key_value, strict=True)
    }
    state |= {
        f"{prefix}mlp.{name}.weight": part for name, part in zip(_GATED, gate_up, strict=True)
    }
    return state | {
        f"{prefix}self_attn.o_proj.weight": block.out.weight,
        f"{prefix}mlp.down_proj.weight": block.down.weight,
        f"{prefix}input_layernorm.weight": block.norm1,
        f"{prefix}post_attention_layernorm.weight": block.norm2,
    }


def to_llama_state(model: Decoder) -> dict[str, Tensor]:
    """Weights with the names of LlamaForCausalLM, in bfloat16."""
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.norm,
    }
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        state |= _block_state(block, f"model.layers.{index}.")
    return {name: w.detach().cpu().to(torch.bfloat16).contiguous() for name, w in state.items()}


@torch.no_grad()
def load_llama_state(model: Decoder, state: dict[str, Tensor]) -> None:
    """Copy the weights of a LlamaForCausalLM with tied embeddings to the training model."""
    model.embed.weight.copy_(state["model.embed_tokens.weight"])
    model.norm.copy_(state["model.norm.weight"])
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        prefix = f"model.layers.{index}."
        qkv = [state[f"{prefix}self_attn.{name}.weight"] for name in _ATTENTION]
        gate_up = [state[f"{prefix}mlp.{name}.weight"] for name in _GATED]
        block.qkv.weight.copy_(torch.cat(qkv))
        block.gate_up.weight.copy_(torch.cat(gate_up))
        block.out.weight.copy_(state[f"{prefix}self_attn.o_proj.weight"])
        block.down.weight.copy_(state[f"{prefix}mlp.down_proj.weight"])
        block.norm1.copy_(state[f"{prefix}input_layernorm.weight"])
        block.norm2.copy_(state[f"{prefix}post_attention_layernorm.weight"])


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_configs(config: ModelConfig, folder: Path) -> None:
    ids: dict[str, object] = {"bos_token_id": _BEGIN_ID, "pad_token_id": _END_ID}
    tokens: dict[str, object] = {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    llama: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": _END_ID,
    }
    _write_json(folder / "config.json", llama | ids | asdict(config))
    stops: dict[str, object] = {"eos_token_id": [_END_ID, _DOCUMENT_ID], "do_sample": False}
    _write_json(folder / "generation_config.json", ids | stops)
    _write_json(folder / "special_tokens_map.json", tokens)
    reader: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", reader | tokens)


def save_pretrained(model: Decoder, tokenizer_file: Path, folder: Path) -> None:
    """Write a folder for Transformers. The old weights remain if the process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "model.safetensors.tmp"
    save_file(to_llama_state(model), unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / "model.safetensors")
    _write_configs(model.config, folder)
    if tokenizer_file.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_file, folder / "tokenizer.json")


def read_model_config(folder: Path) -> ModelConfig:
    """Read the shape of a checkpoint from its config.json."""
    content = json.loads((folder / "config.json").read_text())
    return ModelConfig(**{field.name: content[field.name] for field in fields(ModelConfig)})


def load_pretrained(folder: Path) -> Decoder:
    """Load a checkpoint folder as a training model in float32."""
    model = Decoder(read_model_config(folder))
    load_llama_state(model, load_file(folder / "model.safetensors"))
    return model
