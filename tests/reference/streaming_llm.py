"""Reference implementation of StreamingLLM for one sequence of a Llama or StableLM.

Keys are stored before RoPE. Each attention call rotates all retained keys by their index among the
retained tokens, and the query by its own index.

Source: Xiao et al. 2023, section 3.2; in blocks as Batch-Max (Metel et al. 2025), Algorithm 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Stream:
    """At most `cap` tokens are retained; `every` are evicted together, the oldest after `sinks`."""

    cap: int
    every: int
    sinks: int

    def blocks(self, prompt_tokens: int, new_tokens: int) -> list[int]:
        """Tokens of each step: up to the cap, then `every` or the rest, then one."""
        first = min(self.cap, prompt_tokens)
        rest = prompt_tokens - first
        blocks = [first, *[self.every] * (rest // self.every)]
        return [*blocks, *[rest % self.every] * bool(rest % self.every), *[1] * (new_tokens - 1)]

    def stays(self, held: int, tokens: int) -> list[int]:
        """Indices of the tokens that are retained before `tokens` more are appended."""
        if held + tokens <= self.cap:
            return list(range(held))
        newest = self.cap - self.every - self.sinks
        return [*range(self.sinks), *range(held - newest, held)]


class PlainStream:
    """A model, and the raw keys and values of one sequence.

    Args:
        model: of Transformers; its projections, norms and MLPs are used, nothing else.
        stream: which tokens stay.
    """

    def __init__(self, model: PreTrainedModel, stream: Stream) -> None:
        self.model, self.stream = model, stream
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.turning = int(self.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        self.theta = config.rope_parameters["rope_theta"]
        nothing = torch.empty(0, self.kv_heads, self.head_dim)
        self.keys = [nothing for _ in model.model.layers]
        self.values = [nothing for _ in model.model.layers]
        self.max_held = 0

    @torch.inference_mode()
    def answer(self, prompt: list[int], new_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens, and the logits they were chosen by."""
        tokens, logits = list(prompt), []
        start = 0
        for count in self.stream.blocks(len(prompt), new_tokens):
            last = self._read(tokens[start : start + count])
            start += count
            if start >= len(prompt):
                logits.append(last)
                tokens.append(int(last.argmax()))
        return tokens[len(prompt) :], torch.stack(logits)

    def _read(self, token_ids: list[int]) -> Tensor:
        """Logits behind the last of some tokens."""
        stays = self.stream.stays(len(self.keys[0]), len(token_ids))
        hidden = self.model.model.embed_tokens(torch.tensor(token_ids))
        for number, layer in enumerate(self.model.model.layers):
            self.keys[number] = self.keys[number][stays]
            self.values[number] = self.values[number][stays]
            hidden = hidden + self._attend(number, layer, layer.input_layernorm(hidden))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.max_held = max(self.max_held, len(self.keys[0]))
        return self.model.lm_head(self.model.model.norm(hidden[-1]))

    def _attend(self, number: int, layer, hidden: Tensor) -> Tensor:
        attention, count = layer.self_attn, len(hidden)
        query, key, value = (
            projection(hidden).view(count, -1, self.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        keys = self.keys[number] = torch.cat([self.keys[number], key])
        values = self.values[number] = torch.cat([self.values[number], value])
        place = torch.arange(len(keys))
        own = place[-count:]
        group = self.heads // self.kv_heads
        turned = self._turn(keys, place).repeat_interleave(group, dim=1)
        products = torch.einsum("qhd,shd->hqs", self._turn(query, own), turned)
        products = products * self.head_dim**-0.5
        products = products.masked_fill(place > own[:, None], -torch.inf)
        seen = products.softmax(dim=-1)
        out = torch.einsum("hqs,shd->qhd", seen, values.repeat_interleave(group, dim=1))
        return attention.o_proj(out.flatten(1))

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on the first `turning` numbers of each head: i goes round with i + turning / 2."""
        half = self.turning // 2
        angle = positions[:, None] * self.theta ** (-torch.arange(half) / half)
        cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat(
            [first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1
        )
