"""A Hugging Face folder of the Llama-type model in a GGUF file: weights, config, tokenizer with chat template.

Called by `prepare`. GGUF keeps the rows of query and key projections in the order of llama.cpp's rotary embedding,
which turns neighbours; Hugging Face turns halves, so their rows are put back. A tied head is not stored twice.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # GGUF's type of tokens that are no text
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(gguf: Path, out: Path, *, dtype: str) -> None:
    """Fill a folder, which must exist, with weights of a `dtype` such as `bfloat16`."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = model_config(fields, tied=tied, dtype=dtype)
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    eos, pad = (config[f"{name}_token_id"] for name in ("eos", "pad"))
    save_file(dict(weights(reader, config)), out / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(fields).save(str(out / "tokenizer.json"))
    template = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "model_max_length": config["max_position_embeddings"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    for name, content in {
        "config": config,
        "generation_config": {"eos_token_id": eos, "pad_token_id": pad},
        "tokenizer_config": template,
    }.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def model_config(fields: dict[str, Any], *, tied: bool, dtype: str) -> dict[str, Any]:
    """`config.json` of a GGUF file's metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": None,  # a chat template begins a text, nothing else
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by their Hugging Face names, of the config's dtype."""
    dtype: torch.dtype = getattr(torch, config["dtype"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        stem, kind = tensor.name.rsplit(".", 1)
        own = stem.rpartition(".")[2]
        if own in heads:
            array = halves(array, heads[own])
        place = stem.split(".")[1] if own in INNER else ""
        name = f"model.layers.{place}.{INNER[own]}" if place else OUTER[own]
        yield f"{name}.{kind}", torch.from_numpy(np.array(array)).to(dtype)


def halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows 0, 2, 4, ... of each head first, then 1, 3, 5, ...; `rows` is [heads * D, H]."""
    paired = rows.reshape(heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that cuts numbers into digits."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    left_right = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL])
    return tokenizer
