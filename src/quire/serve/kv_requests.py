"""The endpoints of single requests: states, timelines, the tokens that lanes retain; prefixes."""

import base64
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from quire.engine.core import Engine
from quire.engine.inspection.prefixes import Blocks, Chain, read_prefixes
from quire.engine.inspection.requests import find_request, one_request, request_rows
from quire.engine.inspection.retention import Retention, read_retention
from quire.serve.errors import UnknownRequest
from quire.serve.kv_scope import only_tenant, refuse_unknown_parameters, without_other_tenants
from quire.serve.service import Service
from quire.serve.tenant_keys import tenant_of

MOST_ROWS, DEFAULT_ROWS = 1000, 100
MOST_TOKENS, DEFAULT_TOKENS = 16_384, 4096
MOST_CHAINS, DEFAULT_CHAINS = 2000, 200

Body = dict[str, Any]


class KVRequestEndpoints:
    """Handlers of HTTP requests about single requests and prefixes.

    Args:
        service: the service; it is started before the first request.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def router(self) -> APIRouter:
        """Create the router with all paths."""
        router = APIRouter(prefix="/v1/kv")
        router.add_api_route("/requests", self.requests, methods=["GET"])
        router.add_api_route("/requests/{request_id}", self.request, methods=["GET"])
        router.add_api_route("/requests/{request_id}/tokens", self.tokens, methods=["GET"])
        router.add_api_route("/prefixes", self.prefixes, methods=["GET"])
        return router

    async def requests(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = DEFAULT_ROWS
    ) -> JSONResponse:
        """Return running, waiting and recently finished requests, and why requests wait."""
        refuse_unknown_parameters(request, ("limit",))
        tenant = only_tenant(self._service, request)

        def read(engine: Engine) -> Body:
            return {"time_s": engine.events.now_s(), **request_rows(engine, tenant, limit)}

        found = await self._service.inspect(read)
        return JSONResponse({"object": "kv.requests", "unix_time_s": time.time(), **found})

    async def request(self, request: Request, request_id: str) -> JSONResponse:
        """Return one request with its timeline: its events, with times, costs and reasons."""
        tenant = only_tenant(self._service, request)

        def read(engine: Engine) -> Body | None:
            found = one_request(engine, request_id, tenant)
            return None if found is None else {"time_s": engine.events.now_s(), **found}

        found = await self._service.inspect(read)
        if found is None:
            raise UnknownRequest(request_id, "open or recently finished")
        found["timeline"] = [without_other_tenants(e, tenant) for e in found["timeline"]]
        return JSONResponse({"object": "kv.request", "unix_time_s": time.time(), **found})

    async def tokens(
        self,
        request: Request,
        request_id: str,
        first: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = DEFAULT_TOKENS,
        lanes: bool = False,  # noqa: FBT001, FBT002 - a query parameter
    ) -> JSONResponse:
        """Return the tokens of an open request, and how many lanes still retain each of them."""
        refuse_unknown_parameters(request, ("first", "limit", "lanes"))
        tenant = only_tenant(self._service, request)

        def read(engine: Engine) -> Retention | None:
            found = find_request(engine, request_id, tenant)
            return None if found is None else read_retention(engine.pool, found)

        retention = await self._service.inspect(read)
        if retention is None:
            raise UnknownRequest(request_id, "open")
        body = await self._service.texts.in_turn_of(
            tenant_of(request), lambda: self._tokens(retention, first, limit, with_lanes=lanes)
        )
        return JSONResponse({"object": "kv.tokens", "request_id": request_id, **body})

    def _tokens(self, found: Retention, first: int, limit: int, *, with_lanes: bool) -> Body:
        shown = found.token_ids[first : first + limit]
        mask = found.mask()[:, first : first + limit]
        pieces = self._service.pieces
        texts = [pieces.text(token) for token in shown] if self._service.shows_texts else None
        body = {
            "first": first,
            "num_tokens": len(found.token_ids),
            "prompt_tokens": found.prompt_tokens,
            "computed_tokens": found.num_computed,
            "num_lanes": len(mask),
            "token_ids": shown if self._service.shows_texts else None,
            "texts": texts,
            "retained": mask.sum(axis=0).tolist(),
        }
        if with_lanes:
            packed = np.packbits(mask, axis=1, bitorder="little")
            body["lanes"] = found.lanes
            body["bitmaps"] = [base64.b64encode(lane.tobytes()).decode() for lane in packed]
        return body

    async def prefixes(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=MOST_CHAINS)] = DEFAULT_CHAINS
    ) -> JSONResponse:
        """Return the prefix cache as a tree of chains, with texts of the client's own tenant."""
        refuse_unknown_parameters(request, ("limit",))
        tenant, own = only_tenant(self._service, request), tenant_of(request)

        def read(engine: Engine) -> tuple[float, Blocks]:
            return engine.events.now_s(), read_prefixes(engine, tenant)

        now_s, blocks = await self._service.inspect(read)
        body = await self._service.texts.in_turn_of(
            own, lambda: self._prefixes(blocks, now_s, own, limit)
        )
        return JSONResponse({"object": "kv.prefixes", "time_s": now_s, **body})

    def _prefixes(self, blocks: Blocks, now_s: float, own: str, limit: int) -> Body:
        tree, chains = blocks.tree, blocks.chains()
        shown = _largest(chains, limit)
        index = {old: new for new, old in enumerate(shown)}
        return {
            "enabled": tree.enabled,
            "block_tokens": tree.block_tokens,
            "block_bytes": tree.block_bytes,
            "num_blocks": tree.num_blocks,
            "num_left_out": tree.num_left_out,
            "num_chains": len(chains),
            "data": [self._chain(chains[i], index, blocks, now_s, own) for i in shown],
        }

    def _chain(
        self, chain: Chain, index: dict[int, int], blocks: Blocks, now_s: float, own: str
    ) -> Body:
        tree = blocks.tree
        may_read = chain.owner in ("", own) and self._service.shows_texts
        text = "".join(map(self._service.pieces.text, chain.token_ids)) if may_read else None
        idle_s = 0.0 if math.isinf(chain.idle_since_s) else max(0.0, now_s - chain.idle_since_s)
        return {
            "parent": index.get(chain.parent),
            "tenant": chain.owner or None,
            "start": chain.start,
            "blocks": chain.blocks,
            "tokens": chain.blocks * tree.block_tokens,
            "bytes": chain.blocks * tree.block_bytes,
            "references": chain.users,
            "idle_s": None if chain.users else round(idle_s, 3),
            "text": text,
        }


def _largest(chains: Sequence[Chain], limit: int) -> list[int]:
    """Indices of the chains with the most blocks, and of all chains before them, in order."""
    by_size = sorted(range(len(chains)), key=lambda i: -chains[i].blocks)
    shown: set[int] = set()
    for number in by_size:
        path = [number]
        while chains[path[-1]].parent >= 0:
            path.append(chains[path[-1]].parent)
        if len(shown.union(path)) > limit:
            break
        shown.update(path)
    return sorted(shown)
