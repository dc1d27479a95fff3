"""The Python entry: prompts in, answers out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from quire.engine.core import Engine
from quire.engine.outputs import Answer, AnswerBuilder, Delta
from quire.engine.sampling_params import SamplingParams
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.stats import EngineStats
from quire.errors import RequestError
from quire.kv.config import KVConfig
from quire.models.loader import LoadedModel, load_model
from quire.models.tokenizer import encode_prompt, render_chat

Prompt = str | Sequence[int]
Progress = Callable[[EngineStats, list[Delta]], None]


class LLM:
    """A model with a KV memory fixed in bytes.

    Args:
        model: "quire-tiny", a folder in Hugging Face format, a hub name, or a loaded model.
        dtype: auto (as stored), float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        kv: the KV memory: its size, pages, and what stays.
        schedule: how much a step does, how many requests run.
        trust_remote_code: run Python code that the model folder brings.
        verify: compare with Transformers' own attention at load.

    Raises:
        ConfigError: options that cannot be; before the KV memory is taken.
        ModelError: a model folder that cannot be read.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kv: KVConfig | None = None,
        schedule: ScheduleConfig | None = None,
        trust_remote_code: bool = False,
        verify: bool = True,
    ) -> None:
        if not isinstance(model, LoadedModel):
            model = load_model(
                model,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                verify=verify,
            )
        self.model = model
        self.engine = Engine(model, kv, schedule)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as the model's tokenizer reads it, or ids as they are.

        Raises:
            RequestError: text for a model without a tokenizer.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        return encode_prompt(self._tokenizer(), prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Raises:
            RequestError: the model has no chat template.
        """
        tokenizer = self._tokenizer()
        text = render_chat(tokenizer, messages)
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.model.tokenizer is None:
            raise RequestError(f"{self.model.name} has no tokenizer: give prompts as token ids")
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[Answer]:
        """Answer prompts, all of them together; answers come in the order of the prompts.

        Args:
            prompts: one or many, each a string or a list of token ids.
            sampling: one for all, or one for each.
            progress: called after every step with the engine's numbers and the step's deltas.

        Raises:
            RequestError: a prompt or its options are wrong; nothing has been run then.
            NeverFits: a prompt needs more KV than the whole pool has.
        """
        many = _as_list(prompts)
        options = _options_for(sampling, len(many))
        builders: dict[str, AnswerBuilder] = {}
        try:
            for prompt, params in zip(many, options, strict=True):
                ids = self.encode(prompt)
                request_id = self.engine.submit(ids, params)
                builders[request_id] = AnswerBuilder(request_id, tuple(ids))
        except RequestError:
            self._withdraw(builders)
            raise
        answers = dict(self._finish(builders, progress))
        return [answers[request_id] for request_id in builders]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt piece by piece. Closing the iterator cancels the request."""
        request_id = self.engine.submit(self.encode(prompt), sampling)
        done = False
        try:
            while not done:
                for delta in self.engine.step():
                    if delta.request_id == request_id:
                        done = delta.finish_reason is not None
                        yield delta
        finally:
            if not done:
                self._withdraw([request_id])

    def stats(self) -> EngineStats:
        """The ledger: who holds how many bytes."""
        return self.engine.stats()

    def _finish(
        self, builders: Mapping[str, AnswerBuilder], progress: Progress | None
    ) -> Iterator[tuple[str, Answer]]:
        try:
            while self.engine.has_work:
                deltas = self.engine.step()
                if progress is not None:
                    progress(self.engine.stats(), deltas)
                for delta in deltas:
                    answer = builders[delta.request_id].add(delta)
                    if answer is not None:
                        yield delta.request_id, answer
        except KeyboardInterrupt:
            self._withdraw(builders)
            raise

    def _withdraw(self, request_ids: Iterable[str]) -> None:
        """Cancel requests and take their last deltas, so that the engine is idle again."""
        for request_id in request_ids:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _options_for(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(f"expected one SamplingParams or {count} of them, got {len(sampling)}")
    return sampling
