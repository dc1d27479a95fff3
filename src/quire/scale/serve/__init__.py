"""The application for Ray Serve: a gateway and replicas of an engine.

    serve run quire.scale.serve:app model=Qwen/Qwen2.5-0.5B-Instruct kv-memory=4GiB ray-replicas=1:4

`quire serve MODEL --ray` starts the same application. Ray and the server are imported when they are
needed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: Mapping[str, Any]) -> "Application":
    """Build the application; `serve run` and configurations of Ray Serve call this.

    Args:
        args: `model`, and options of `quire serve` by the names of their flags, such as
            `kv-memory` and `ray-replicas`.

    Raises:
        ConfigError: a missing package, an unknown option or an invalid value.
    """
    for extra in ("ray", "serve"):
        require_extra(extra, "quire.scale.serve:app")
    from quire.scale.serve.application import application
    from quire.scale.serve.builder import recipe_of

    return application(recipe_of(args))
