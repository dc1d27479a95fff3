"""The endpoints of the server, one method per path."""

import logging
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.config.sampling_params import SamplingParams
from quire.serve.errors import FieldError, Format, PlainFormat
from quire.serve.fields import listed, refusal
from quire.serve.json_route import JsonRoute
from quire.serve.params import (
    COMPLETION_MAX_TOKENS,
    chat_params,
    completion_params,
    naming_fields_of,
    requested_tokens,
)
from quire.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    PromptBody,
    StreamOptions,
    TokenizeBody,
)
from quire.serve.responses import STREAM, ChatWriter, CompletionWriter, Envelope, Writer
from quire.serve.service import CHARGED_TOKENS, Service
from quire.serve.streaming import GenerationResponse
from quire.serve.submission import submit
from quire.serve.tenant_keys import tenant_of
from quire.serve.text import Prompt, Turn, template_kwargs, unread_fields, unread_kwargs
from quire.serve.tools.chat import ChatTools
from quire.serve.tools.definitions import read_tools

logger = logging.getLogger(__name__)


class Endpoints:
    """Handlers of HTTP requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)
        router.add_api_route(
            "/v1/completions", self.completions, methods=["POST"], responses=STREAM
        )
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], responses=STREAM)
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        return router

    # ---- generation ----------------------------------------------------------------------------

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Generate completions of prompts."""
        with naming_fields_of(body):
            return await self._completions(body, request)

    async def _completions(self, body: CompletionBody, request: Request) -> Response:
        self.check(body, request)
        service, num_choices = self._service, body.n or 1
        tenant = tenant_of(request)
        turn = service.turn(tenant, service.rule_of(body, tenant))
        bad_words = await service.texts.bad_words(body.bad_words, turn)
        params = completion_params(body, service.llm.model.generation, bad_words)
        service.check_number(len(body.prompts), params)
        prompts = await self.prompts(body, body.prompts, turn, with_text=bool(body.echo))
        echoes = [prompt.text if body.echo else None for prompt in prompts]
        writers = [
            CompletionWriter(
                index=index,
                pieces=service.pieces,
                wants_logprobs=body.logprobs is not None,
                echo=echoes[index // num_choices],
                scores_prompt=body.prompt_logprobs is not None,
            )
            for index in range(len(prompts) * num_choices)
        ]
        envelope = Envelope.of_completion(service.model_name, body.request_options())
        return await self._respond(body, request, prompts, params, writers, envelope)

    async def prompts(
        self,
        body: CompletionBody | EmbeddingBody,
        requested: list[str | list[int]],
        turn: Turn,
        *,
        with_text: bool = False,
    ) -> list[Prompt]:
        """Tokenize and truncate the prompts of a body."""
        keep = self._kept_tokens(body, turn)
        return await self._service.texts.prompts(
            requested,
            turn,
            add_special_tokens=body.add_special_tokens is not False,
            with_text=with_text,
            keep=keep,
        )

    def _kept_tokens(self, body: PromptBody, turn: Turn) -> int | None:
        """Tokens at the end of a prompt that are used; None: all.

        -1 leaves room for the output in the longest sequence. Without `max_tokens`, or with one
        that needs all of the sequence, it leaves room for the default.
        """
        keep = body.truncate_prompt_tokens
        if keep != -1:
            return keep
        longest = turn.max_tokens or self._service.max_tokens
        room = 0
        if isinstance(body, GenerationBody):
            requested = requested_tokens(body)
            # the default of a chat is the rest of the context
            default = CHARGED_TOKENS if isinstance(body, ChatBody) else COMPLETION_MAX_TOKENS
            default = min(max(default, body.min_tokens or 0), longest // 2)
            room = default if requested is None or requested >= longest else requested
        return longest - room

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Generate chat completions."""
        return await self.chat_as(PlainFormat(), body, request)

    async def chat_as(self, form: Format, body: ChatBody, request: Request) -> Response:
        """Generate chat completions in another API's format; errors name the fields of a chat."""
        with naming_fields_of(body):
            return await self._chat(form, body, request)

    async def count_tokens(self, body: ChatBody, request: Request) -> int:
        """Return the number of tokens of a chat's prompt."""
        with naming_fields_of(body):
            self.check(body, request)
            turn = self._service.turn(tenant_of(request))
            return len((await self._chat_prompt(body, self._tools(body), turn)).token_ids)

    async def _chat(self, form: Format, body: ChatBody, request: Request) -> Response:
        self.check(body, request)
        service = self._service
        tools = self._tools(body)
        tenant = tenant_of(request)
        turn = service.turn(tenant, service.rule_of(body, tenant))
        prompt = await self._chat_prompt(body, tools, turn)
        bad_words = await service.texts.bad_words(body.bad_words, turn)
        available_tokens = service.available_tokens(len(prompt.token_ids))
        defaults = service.llm.model.generation
        params = chat_params(body, defaults, available_tokens, tools, bad_words)
        writers = [
            ChatWriter(
                index=index,
                pieces=service.pieces,
                wants_logprobs=bool(body.logprobs),
                calls=tools.writer(),
            )
            for index in range(body.n or 1)
        ]
        envelope = Envelope.of_chat(service.model_name, body.request_options(), form.id_prefix)
        return await self._respond(body, request, [prompt], params, writers, envelope, form)

    def _tools(self, body: ChatBody) -> ChatTools:
        return ChatTools.of(
            read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls),
            self._service.tools,
            template_reads_tools=self._service.texts.reads("tools"),
        )

    async def _chat_prompt(self, body: ChatBody, tools: ChatTools, turn: Turn) -> Prompt:
        texts = self._service.texts
        return await texts.chat(
            body.messages,
            turn,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=template_kwargs(body, texts),
            tools=tools.definitions,
            keep=self._kept_tokens(body, turn),
        )

    def check(self, body: Body, request: Request) -> None:
        """Refuse another model's name and wrong fields; record the ignored fields."""
        self._service.check_draining()
        self._service.check_model(body.model)
        texts = self._service.texts
        unknown = body.unknown_fields() + unread_kwargs(body, texts)
        if unknown and self._service.config.unknown_fields == "refuse":
            raise refusal(unknown[0])
        if unknown:
            path = request.url.path
            logger.warning("%s: ignored unknown fields: %s", path, listed(unknown))
        request.state.ignored_fields = listed(unknown + unread_fields(body, texts))

    async def _respond(
        self,
        body: GenerationBody,
        request: Request,
        prompts: list[Prompt],
        params: SamplingParams,
        writers: Sequence[Writer],
        envelope: Envelope,
        form: Format | None = None,
    ) -> Response:
        service = self._service
        submission = await submit(service, request, body, prompts, params, envelope.id)
        response = GenerationResponse(
            submission=submission,
            writers=writers,
            envelope=envelope,
            choices_per_prompt=body.n or 1,
            options=body.stream_options or StreamOptions(),
            interval=body.stream_interval or service.config.stream_interval,
            keep_alive_s=service.config.sse_keep_alive_interval,
            form=form or PlainFormat(),
            scores_prompt=isinstance(body, ChatBody) and body.prompt_logprobs is not None,
        )
        return response.streamed() if body.stream else await response.whole(request)

    # ---- text ----------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Return the token ids of a text or a chat."""
        with naming_fields_of(body):
            return await self._tokenize(body, request)

    async def _tokenize(self, body: TokenizeBody, request: Request) -> Response:
        self.check(body, request)
        service = self._service
        turn = service.turn(tenant_of(request))
        token_ids = (await self._tokenized(body, turn)).token_ids
        wants_texts = bool(body.return_token_strs)
        shown = await service.texts.pieces(token_ids, turn) if wants_texts else None
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": service.max_tokens,
                "tokens": token_ids,
                "token_strs": shown,
            }
        )

    async def _tokenized(self, body: TokenizeBody, turn: Turn) -> Prompt:
        texts = self._service.texts
        if body.messages is not None and body.prompt is None:
            return await texts.chat(
                body.messages,
                turn,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                template_kwargs=template_kwargs(body, texts),
                tools=body.tools if texts.reads("tools") else None,
            )
        if body.prompt is None or body.messages is not None:
            raise FieldError("prompt", "expected either `prompt` or `messages`")
        adds_special = body.add_special_tokens is not False
        return (await texts.prompts([body.prompt], turn, add_special_tokens=adds_special))[0]

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Return the text of token ids."""
        with naming_fields_of(body):
            return await self._detokenize(body, request)

    async def _detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        self.check(body, request)
        turn = self._service.turn(tenant_of(request))
        return JSONResponse({"prompt": await self._service.texts.decoded(body.tokens, turn)})
