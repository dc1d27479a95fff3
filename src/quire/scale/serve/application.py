"""The application of Ray Serve: deployments of the gateway and of the engines.

HTTP proxy of Ray ---> gateway ---> router ---> engine replicas
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.errors import EngineDead
from quire.scale.http_call import HttpCall, HttpPart
from quire.scale.serve.gateway import Gateway, guarded
from quire.scale.serve.recipe import ServeRecipe
from quire.scale.serve.replica import EngineReplica
from quire.serve.embedded import ReplicaLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

ENGINE, GATEWAY = "engine", "gateway"
"""Names of the deployments."""

BLOCK_WORDS = 16
"""Words of four bytes in a block of a prompt, for routing."""

_GATEWAY_REQUESTS = 10_000
_QUIET = {"enable_access_log": False}  # replicas write the access log of `quire serve`
_DRAIN_POLL_S = 0.5
_HEALTH_PERIOD_S = 5.0


def application(recipe: ServeRecipe) -> "Application":
    """The application of a recipe, for `ray.serve.run`."""
    from ray import serve

    engine = serve.deployment(_RayReplica).options(**_engine_options(recipe))
    gateway = serve.deployment(serve.ingress()(_RayGateway)).options(
        name=GATEWAY,
        logging_config=_QUIET,
        num_replicas=1,
        max_ongoing_requests=_GATEWAY_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=recipe.server.shutdown_timeout,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
    )
    bound: Application = gateway.bind(engine.bind(recipe), recipe)
    return bound


def _engine_options(recipe: ServeRecipe) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    config = recipe.ray
    options: dict[str, Any] = {
        "name": ENGINE,
        "logging_config": _QUIET,
        "max_ongoing_requests": config.max_ongoing,
        "ray_actor_options": {"num_cpus": config.cpus, "num_gpus": config.gpus},
        "health_check_period_s": _HEALTH_PERIOD_S,
        # a replica that is removed finishes its requests
        "graceful_shutdown_timeout_s": recipe.server.shutdown_timeout,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
        "request_router_config": RequestRouterConfig(
            request_router_class="quire.scale.serve.ray_router.QuireRequestRouter",
            request_router_kwargs={"block_words": BLOCK_WORDS, **asdict(recipe.routing)},
            request_routing_stats_period_s=config.stats_period_s,
        ),
    }
    if config.min_replicas == config.max_replicas:
        return options | {"num_replicas": config.min_replicas}
    scaling = AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_ongoing,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function="quire.scale.autoscaling.LoadScaling",
            policy_kwargs={
                "target_kv": config.target_kv,
                "target_ongoing": config.target_ongoing,
            },
        ),
    )
    return options | {"autoscaling_config": scaling}


class _RayReplica(EngineReplica):
    """A replica whose end Ray announces by its asynchronous destructor."""

    def __init__(self, recipe: ServeRecipe) -> None:
        from ray import serve

        super().__init__(recipe, serve.get_replica_context().replica_id.unique_id)

    async def __del__(self) -> None:
        await self.close()


class _RayGateway:
    def __init__(self, engine: "DeploymentHandle", recipe: ServeRecipe) -> None:
        self._gateway = Gateway(
            _HandleReplicas(engine),
            recipe.keys,
            retries=recipe.ray.retries,
            block_words=BLOCK_WORDS,
        )
        self._max_body_bytes = recipe.server.max_body

    def __serve_build_asgi_app__(self) -> Any:
        return guarded(self._gateway, self._max_body_bytes)


class _HandleReplicas:
    def __init__(self, engine: "DeploymentHandle") -> None:
        self._engine = engine
        self._streaming = engine.options(method_name="forward", stream=True)

    async def forward(self, call: HttpCall) -> AsyncGenerator[HttpPart, None]:
        response, has_ended = self._streaming.remote(call), False
        try:
            with _losses():
                async for part in response:
                    yield part
            has_ended = True
        finally:
            if not has_ended:
                response.cancel()

    async def ask_all(self, call: HttpCall) -> Sequence[tuple[str, HttpPart]]:
        with _losses():
            found = await self._engine.broadcast("answer", call).results_async(
                return_exceptions=True
            )
        answers = [answer for answer in found if not isinstance(answer, BaseException)]
        if not answers:
            raise ReplicaLost("no replica is running: try again later")
        return sorted(answers, key=lambda answer: answer[0])


@contextmanager
def _losses() -> "Iterator[None]":
    """Turn errors of a replica that ended into `ReplicaLost`."""
    from ray.exceptions import RayActorError, WorkerCrashedError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    try:
        yield
    except (RayActorError, WorkerCrashedError, EngineDead) as error:
        raise ReplicaLost(
            "the replica that ran the request has ended: send the request again"
        ) from error
    except (BackPressureError, DeploymentUnavailableError) as error:
        raise ReplicaLost("no replica is available: try again later") from error
