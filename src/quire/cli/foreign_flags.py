"""Flags of other engines that Quire does not have, and what to use instead."""

from collections.abc import Sequence

_NO_LORA = "Quire does not support LoRA adapters: merge the adapter into the weights first"
_NO_DRAFT = "Quire does not support speculative decoding"
_ONE_DEVICE = "use --tensor-parallel-size for several devices, or start one server per device"
_OFFLOAD = "use --kv-offload-memory for KV or --weights-memory for weights"

_MODEL = "the model is the first argument, without a flag"

FLAGS = {
    # vLLM and SGLang
    "gpu-memory-utilization": "use --kv-memory with the bytes of the KV memory, such as 8GiB",
    "mem-fraction-static": "use --kv-memory with the bytes of the KV memory, such as 8GiB",
    "kv-cache-memory-bytes": "use --kv-memory",
    "num-gpu-blocks-override": "use --kv-memory with the bytes of the KV memory",
    "cpu-offload-gb": "use --weights-memory with the bytes of weights that stay on the device",
    "kv-offloading-size": "use --kv-offload-memory with a size such as 4GiB",
    "quantization": "use --weight-codec for weights or --kv-codec for the KV cache; GPTQ, AWQ and "
    "GGUF files are recognized",
    "pipeline-parallel-size": _ONE_DEVICE,
    "data-parallel-size": "use --ray with --ray-replicas for several engines behind one address",
    "tp-size": "use --tensor-parallel-size",
    "enable-lora": _NO_LORA,
    "lora-modules": _NO_LORA,
    "speculative-config": _NO_DRAFT,
    "speculative-model": _NO_DRAFT,
    "enable-auto-tool-choice": "not needed: requests with `tools` use the parser of --tool-parser",
    "enable-chunked-prefill": "not needed: prompts are always prefilled in chunks of at most "
    "--max-num-batched-tokens",
    "scheduling-policy": "use the request field `priority`, or --urgent; see --batcher",
    "enforce-eager": "use --no-cuda-graphs",
    "guided-decoding-backend": "not needed: structured outputs use llguidance",
    "revision": "download the revision to a folder and pass the folder as MODEL",
    "tokenizer": "put the tokenizer's files into the model folder",
    "download-dir": "set the environment variable HF_HOME",
    "max-running-requests": "use --max-num-seqs",
    "context-length": "use --max-model-len",
    "model-path": _MODEL,
    "chunked-prefill-size": "use --max-num-batched-tokens",
    "page-size": "use --block-size",
    "disable-radix-cache": "use --no-enable-prefix-caching",
    # llama.cpp
    "ctx-size": "use --max-model-len for the longest sequence and --kv-memory for the memory",
    "chat-template-file": "use --chat-template, which takes a file or the template itself",
    "n-gpu-layers": "use --weights-memory with the bytes of weights that stay on the device",
    "cache-type-k": "use --kv-codec KEYS/VALUES, such as int8/int4",
    "cache-type-v": "use --kv-codec KEYS/VALUES, such as int8/int4",
    "parallel": "use --max-num-seqs",
    "n-predict": "use --max-tokens",
    "temp": "use --temperature",
    "no-mmap": "not needed: weights are read into memory; see --weights-memory",
    # Transformers
    "max-new-tokens": "use --max-tokens",
    "max-length": "use --max-tokens for the output and --max-model-len for prompt and output",
    "torch-dtype": "use --dtype",
    "num-beams": "use --use-beam-search with --beam-width",
    "do-sample": "use --temperature; 0 is greedy",
    "attn-implementation": "use --attention",
}
"""What to use instead of a flag, by its name without the leading dashes."""

SHORT_FLAGS = {
    "-m": _MODEL,
    "-c": FLAGS["ctx-size"],
    "-n": FLAGS["n-predict"],
    "-np": FLAGS["parallel"],
    "-ngl": FLAGS["n-gpu-layers"],
    "-ctk": FLAGS["cache-type-k"],
    "-ctv": FLAGS["cache-type-v"],
}
"""What to use instead of a short flag of llama.cpp."""


def short_flag(name: str, arguments: Sequence[str]) -> str:
    """The short flag of llama.cpp that was written, of which click reports one letter.

    Args:
        name: the unknown option, such as -n of -ngl.
        arguments: the command line.
    """
    written = (text.partition("=")[0] for text in arguments)
    return next((text for text in written if text in SHORT_FLAGS and text[:2] == name), name)


def instead_of(flag: str) -> str | None:
    """Return what to use instead of another engine's flag; None if the flag is not known.

    Args:
        flag: name as written, with leading dashes; underscores count as dashes.
    """
    if flag in SHORT_FLAGS:
        return SHORT_FLAGS[flag]
    return FLAGS.get(flag.lstrip("-").replace("_", "-").lower())
