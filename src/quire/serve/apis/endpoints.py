"""The endpoints /v1/responses, /v1/messages and /v1/messages/count_tokens."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.config.sampling_params import SamplingDefaults
from quire.serve.apis import messages, responses
from quire.serve.apis.convert import naming
from quire.serve.apis.messages import MessagesBody, MessagesFormat
from quire.serve.apis.responses import ResponsesBody, ResponsesFormat
from quire.serve.endpoints import Endpoints
from quire.serve.json_route import JsonRoute
from quire.serve.responses import MESSAGES_ERRORS, STREAM


class OtherApis:
    """Handlers of HTTP requests of other chat APIs, which run as chats."""

    def __init__(self, endpoints: Endpoints, defaults: SamplingDefaults) -> None:
        self._endpoints, self._defaults = endpoints, defaults

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)
        router.add_api_route("/v1/responses", self.responses, methods=["POST"], responses=STREAM)
        streamed = STREAM | MESSAGES_ERRORS
        router.add_api_route("/v1/messages", self.messages, methods=["POST"], responses=streamed)
        router.add_api_route(
            "/v1/messages/count_tokens",
            self.count_tokens,
            methods=["POST"],
            responses=MESSAGES_ERRORS,
        )
        return router

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Generate a response (OpenAI's Responses API)."""
        with naming(responses.NAMES):
            chat = body.chat()
        with naming(responses.NAMES, body.origins):
            form = ResponsesFormat(body, self._defaults)
            return await self._endpoints.chat_as(form, chat, request)

    async def messages(self, body: MessagesBody, request: Request) -> Response:
        """Generate a message (Anthropic's Messages API)."""
        form = MessagesFormat(body.stop_sequences or ())
        with naming(messages.NAMES):
            chat = body.chat()
        with naming(messages.NAMES, body.origins):
            return await self._endpoints.chat_as(form, chat, request)

    async def count_tokens(self, body: MessagesBody, request: Request) -> Response:
        """Return the number of tokens of a message's prompt."""
        with naming(messages.NAMES):
            chat = body.prompt_chat()
        with naming(messages.NAMES, body.origins):
            count = await self._endpoints.count_tokens(chat, request)
        return JSONResponse({"input_tokens": count})
