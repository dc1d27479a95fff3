"""The model class `quire` of lm-evaluation-harness, which this module imports and registers it in.

Requests of a task run in one batch of the engine, whose size follows from the KV memory. Options of
the engine are model arguments, see `llm_options`.

The log-probability of a continuation is that of prompt tokens and of one generated token: the last
token of the continuation is the only one that the request may generate. So an eviction rule acts
while context and continuation are prefilled, in chunks. A rule with `when=prefill_end` or `decode`
evicts nothing before the last token.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub.utils.tqdm import tqdm
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError, UnknownName
from quire.evals.lm_eval import NAME
from quire.evals.lm_eval.requests import llm_options, log_likelihood, sampling_params
from quire.sampling.outputs import RequestOutput

REQUESTS_AT_ONCE = 512
"""Requests that are submitted together; the engine forms batches of them."""

_Tokens = list[int]
_Pair = tuple[Any, _Tokens, _Tokens]
"""Key of a request in the harness' cache, tokens of the context and of the continuation."""


class QuireLM(TemplateLM):  # type: ignore[misc]  # the base class has no types
    """A model in Quire's engine.

    Args:
        pretrained: model folder, name on the hub, GGUF file, or quire-tiny.
        max_length: most tokens of a prompt with its output; default: the model's context. Longer
            contexts lose their first tokens.
        max_gen_toks: output tokens of tasks that set none.
        prefix_token_id: token before texts without a context; default: the tokenizer's first one.
        add_bos_token: whether contexts begin with the tokenizer's special tokens; default: as the
            tokenizer is set.
        batch_size, max_batch_size: of the harness; without effect, as the KV memory and
            max_num_seqs limit a batch.
        device: auto, cpu, cuda or cuda:N; the harness' default cuda:0 is auto.
        options: options of the engine.
    """

    def __init__(  # noqa: PLR0913 - one parameter per argument of the harness
        self,
        pretrained: str = "quire-tiny",
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            # the harness' default means the first CUDA device, else the CPU
            options["device"] = "auto" if device == "cuda:0" else device
        self._llm = LLM(pretrained, **_built(options))
        self._context = self._llm.model.spec.max_positions
        if max_length is not None and not 2 <= max_length <= self._context:
            raise ConfigError(
                f"expected max_length from 2 to the model's context of {self._context} tokens, got "
                f"{max_length}"
            )
        self.max_length = max_length or self._context
        self.max_gen_toks = max_gen_toks
        self._prefix_token_id, self._add_bos_token = prefix_token_id, add_bos_token
        tokenizer = self._llm.model.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{pretrained} has no tokenizer: add tokenizer.json to its folder")
        self.tokenizer: Any = tokenizer

    @property
    def eot_token_id(self) -> int:
        if self.tokenizer.eos_token_id is not None:
            return int(self.tokenizer.eos_token_id)
        return self._llm.model.generation.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return self._llm.model.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> _Tokens:
        """Token ids of a text; a text that begins with the prefix token gets no other one."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token is not False
            prefix = str(self.tokenizer.decode([self.prefix_token_id]))
            if prefix and string.startswith(prefix):
                add_special_tokens = False
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._llm.chat_template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, in disjoint windows of at most `max_length` tokens."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        flat = [(None, *window) for each in windows for window in each]
        found = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        totals = [sum(next(found)[0] for _ in each) for each in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Outputs up to a stop text."""
        submitted = [self._generation(*request.args) for request in requests]
        texts = []
        outputs = self._outputs(submitted, "generate_until", disable_tqdm=disable_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            texts.append(output.text)
            self.cache_hook.add_partial("generate_until", request.args, output.text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding returns it."""
        submitted = [self._scoring(context, rest) for _, context, rest in requests if rest]
        outputs = self._outputs(submitted, "loglikelihood", disable_tqdm=disable_tqdm)
        results = []
        for key, _, rest in requests:
            result = log_likelihood(next(outputs), len(rest)) if rest else (0.0, True)
            results.append(result)
            if key is not None:  # windows of a longer text have none
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _windows(self, text: str) -> Iterable[tuple[_Tokens, _Tokens]]:
        windows: Iterable[tuple[_Tokens, _Tokens]] = map(
            make_disjoint_window,
            get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_scored,
                context_len=1,
            ),
        )
        return windows

    @property
    def _max_scored(self) -> int:
        """Most tokens before the last one of a continuation: one token must fit after them."""
        return min(self.max_length, self._context - 1)

    def _scoring(self, context: _Tokens, continuation: _Tokens) -> GenerationRequest:
        """Score all tokens but the last as a prompt, and the last as the only possible output."""
        if len(continuation) > self._max_scored:
            raise RequestError(
                f"expected a continuation of at most {self._max_scored} tokens, got "
                f"{len(continuation)}: raise max_length, or shorten it"
            )
        *prompt, last = (context + continuation)[-self._max_scored - 1 :]
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            allowed_token_ids=(last,),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if len(continuation) > 1 else None,
        )
        return GenerationRequest(prompt, params)

    def _generation(self, context: str, given: Mapping[str, Any]) -> GenerationRequest:
        options = dict(given)
        evict, sparse = (options.pop(name, None) for name in ("evict", "sparse"))
        params = sampling_params(options, self.max_gen_toks)
        most = self.max_length - params.max_tokens
        if most < 1:
            raise RequestError(
                f"expected fewer output tokens than max_length, got {params.max_tokens} of "
                f"{self.max_length}: lower max_gen_toks"
            )
        prompt = self.tok_encode(context)[-most:]
        return GenerationRequest(prompt, params, evict=evict, sparse=sparse)

    def _outputs(
        self, requests: Sequence[GenerationRequest], name: str, *, disable_tqdm: bool
    ) -> Iterator[RequestOutput]:
        """Run requests and yield their outputs in order; a failed request raises RequestError."""
        shown: Any = tqdm  # has no types
        with shown(total=len(requests), desc=f"Running {name}", disable=disable_tqdm) as bar:
            for start in range(0, len(requests), REQUESTS_AT_ONCE):
                for output in self._llm.generate(requests[start : start + REQUESTS_AT_ONCE]):
                    if output.error is not None:
                        raise RequestError(f"a request of {name} failed: {output.error}")
                    bar.update()
                    yield output


def _built(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM`; explains an option that the harness has cut at a comma."""
    try:
        return llm_options(options)
    except UnknownName as error:
        raise ConfigError(
            f"{error}. Quote a value with commas: --model_args pretrained=quire-tiny "
            "'evict=\"recent:cap=128,sinks=4\"'"
        ) from error


register_model(NAME)(QuireLM)
