"""llama.cpp through the C functions of llama-cpp-python: slots of one length, filled in order.

As in its server, a request occupies a slot from its prefill to its last token, and one batch holds
the next tokens of all slots, prompts in chunks. The model is converted here without a tokenizer.

`options` of the job: `lookup`, the number of tokens that the prompt lookup of llama-cpp-python
proposes, or 0. Then prompts run one after the other through its generator.
"""

import ctypes
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.protocol import (
    Job,
    Outputs,
    Result,
    file_bytes,
    peak_rss_bytes,
    serve,
)

_SLOT_MULTIPLE = 256  # llama.cpp rounds the context of a sequence up to a multiple
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of weights in GGUF files by their names in Transformers, without layer and `.weight`."""


def gguf_name(name: str) -> str:
    """Name of a weight in a GGUF file."""
    short = name.removesuffix(".weight")
    if not short.startswith("model.layers."):
        return f"{_NAMES[short]}.weight"
    _, _, layer, part = short.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def stored_weights(folder: str) -> dict[str, Any]:
    """Weights of a bfloat16 checkpoint in one file, as arrays of their 16 bits.

    Raises:
        ValueError: a weight of another type.
    """
    import numpy as np

    path = Path(folder) / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    values = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    header.pop("__metadata__", None)
    found = {}
    for name, stored in header.items():
        if stored["dtype"] != "BF16":
            raise ValueError(f"expected weights in BF16, got {stored['dtype']} for {name}")
        begin, end = stored["data_offsets"]
        found[name] = values[begin:end].view(np.uint16).reshape(stored["shape"])
    return found


def interleaved(weight: Any, heads: int) -> Any:
    """Reorder the rows of each head from halves to pairs, as llama.cpp's rotation expects."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def prepare(job: Job) -> None:
    """Write the model as a GGUF file: bfloat16, or float16 without bfloat16 arithmetic."""
    import gguf
    import numpy as np

    config = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    folder = Path(job["prepared"])
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    write_shape(writer, config)
    for name, bits in stored_weights(job["model"]).items():
        for part, count in heads.items():
            if name.endswith(f"{part}.weight"):
                bits = interleaved(bits, count)
        floats = (bits.astype(np.uint32) << 16).view(np.float32)
        if bits.ndim == 1:  # norms are float32 in GGUF files
            writer.add_tensor(gguf_name(name), floats)
        elif job["dtype"] == "bfloat16":
            kind = gguf.GGMLQuantizationType.BF16
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), floats.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: Any, config: dict[str, Any]) -> None:
    """Add the shape of the model; it has no tokenizer."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


@dataclass
class Slot:
    """A request in a slot.

    Attributes:
        prompt: index of the prompt.
        pending: tokens that are not yet computed.
        remaining: number of tokens still to generate.
        length: number of computed tokens.
    """

    prompt: int
    pending: deque[int]
    remaining: int
    length: int = 0


@dataclass
class Runner:
    """A context of llama.cpp with a number of slots.

    Attributes:
        library: the module with llama.cpp's C functions.
        context: the context.
        slots: number of slots.
        step_tokens: most tokens of a batch.
        vocab_size: number of logits.
    """

    library: Any
    context: Any
    slots: int
    step_tokens: int
    vocab_size: int
    batch: Any = field(init=False)

    def __post_init__(self) -> None:
        self.batch = self.library.llama_batch_init(self.step_tokens, 0, 1)

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Outputs:
        """Run prompts to their number of tokens."""
        outputs = Outputs(len(prompts))
        waiting = deque(range(len(prompts)))
        open_slots: dict[int, Slot] = {}
        while waiting or open_slots:
            for number in range(self.slots):
                if waiting and number not in open_slots:
                    i = waiting.popleft()
                    open_slots[number] = Slot(i, deque(prompts[i]), new_tokens[i])
            for number, token in self._step(open_slots).items():
                slot = open_slots[number]
                outputs.add(slot.prompt, [token])
                slot.remaining -= 1
                slot.pending.append(token)
                if not slot.remaining:
                    memory = self.library.llama_get_memory(self.context)
                    self.library.llama_memory_seq_rm(memory, number, -1, -1)
                    del open_slots[number]
        return outputs

    def _step(self, open_slots: dict[int, Slot]) -> dict[int, int]:
        """Compute one batch, decoding slots first; return the next token of complete slots."""
        self.batch.n_tokens = 0
        ends: dict[int, int] = {}
        for number, slot in sorted(open_slots.items(), key=lambda item: len(item[1].pending)):
            while slot.pending and self.batch.n_tokens < self.step_tokens:
                self._add(slot.pending.popleft(), slot.length, number)
                slot.length += 1
                if not slot.pending:
                    ends[number] = self.batch.n_tokens - 1
                    self.batch.logits[ends[number]] = 1
        status = self.library.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return {number: self._best(row) for number, row in ends.items()}

    def _add(self, token: int, position: int, number: int) -> None:
        at = self.batch.n_tokens
        self.batch.token[at], self.batch.pos[at] = token, position
        self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, number
        self.batch.logits[at] = 0
        self.batch.n_tokens += 1

    def _best(self, row: int) -> int:
        import numpy as np

        logits = self.library.llama_get_logits_ith(self.context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())


def slot_tokens(job: Job) -> int:
    """Length of a slot: the longest request, rounded up as llama.cpp does."""
    lengths = (
        len(prompt) + new for prompt, new in zip(job["prompts"], job["new_tokens"], strict=True)
    )
    return -(-max(lengths) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE


def open_runner(job: Job) -> tuple[Runner, int]:
    """Load the model; returns the runner and the bytes of the weights."""
    import llama_cpp as library

    library.llama_backend_init()
    path = f"{job['prepared']}/model.gguf".encode()
    model = library.llama_model_load_from_file(path, library.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path.decode()}")
    slots = job["kv_bytes"] // (job["kv_bytes_per_token"] * slot_tokens(job))
    slots = min(slots, len(job["prompts"]))
    if not slots:
        raise RuntimeError("the KV memory is smaller than one slot of llama.cpp")
    options = library.llama_context_default_params()
    options.n_ctx = slots * slot_tokens(job)
    options.n_seq_max = slots
    options.n_batch = job["max_num_batched_tokens"]
    options.n_threads = options.n_threads_batch = job["threads"]
    context = library.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError("llama.cpp cannot allocate its context")
    config = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    runner = Runner(library, context, slots, job["max_num_batched_tokens"], config["vocab_size"])
    return runner, library.llama_model_size(model)


class Generator:
    """Prompts one after the other through the generator of llama-cpp-python."""

    slots = 1

    def __init__(self, job: Job) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        tokens, threads = job["options"]["lookup"], job["threads"]
        self._llama = Llama(
            f"{job['prepared']}/model.gguf",
            n_ctx=slot_tokens(job),
            n_batch=job["max_num_batched_tokens"],
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=tokens) if tokens else None,
            verbose=False,
        )

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Outputs:
        """Run prompts to their number of tokens."""
        outputs = Outputs(len(prompts))
        for i, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
            for _, token in zip(range(new), self._llama.generate(prompt, temp=0.0), strict=False):
                outputs.add(i, [token])
        return outputs


def run(job: Job) -> Result:
    """Run all prompts at once, or one after the other with `lookup`."""
    import llama_cpp

    started_s = time.perf_counter()
    runner: Runner | Generator
    if "lookup" in job["options"]:
        runner, weight_bytes = Generator(job), file_bytes(job["prepared"], "model.gguf")
    else:
        runner, weight_bytes = open_runner(job)
    warm = job["warmup_prompts"]
    runner.generate(warm, [job["warmup_tokens"]] * len(warm))
    load_s = time.perf_counter() - started_s
    outputs = runner.generate(job["prompts"], job["new_tokens"])
    total_s = outputs.elapsed_s()
    return Result(
        version=llama_cpp.__version__,
        weights_type="bfloat16" if job["dtype"] == "bfloat16" else "float16",
        weight_bytes=weight_bytes,
        kv_type="float16",
        kv_bytes=runner.slots * slot_tokens(job) * job["kv_bytes_per_token"],
        load_s=load_s,
        total_s=total_s,
        times_s=outputs.times_s,
        tokens=outputs.tokens,
        peak_rss_bytes=peak_rss_bytes(),
        figures={
            "slots": runner.slots,
            "system": llama_cpp.llama_print_system_info().decode(),
        },
    )


if __name__ == "__main__":
    serve(prepare, run)
