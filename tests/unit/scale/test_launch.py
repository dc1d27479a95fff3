"""Starts of Ray Serve on a busy machine; Ray is replaced by a double."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from quire.errors import EngineDead
from quire.scale.recipe import EngineRecipe
from quire.scale.serve import launch
from quire.scale.serve.recipe import ServeRecipe

RECIPE = ServeRecipe(engine=EngineRecipe(model="quire-tiny"))


class SlowServe(ModuleType):
    """`ray.serve` whose proxies start after some polls; None: never."""

    def __init__(self, num_polls):
        super().__init__("ray.serve")
        self.num_polls, self.calls = num_polls, []

    def start(self, **options):
        self.calls.append("start")
        if self.calls == ["start"]:
            raise TimeoutError("HTTP proxies not available after 60s.")

    def run(self, application, *, name, route_prefix):
        self.calls.append("run")
        raise TimeoutError("Proxies not available after 60s.")

    def status(self):
        self.calls.append("status")
        is_up = self.num_polls is not None and self.calls.count("status") > self.num_polls
        proxy = SimpleNamespace(value="HEALTHY" if is_up else "STARTING")
        return SimpleNamespace(proxies={"node": proxy})


@pytest.fixture
def slow_serve(monkeypatch):
    """Install a `ray.serve` that is slow to start; return what makes one."""

    def install(num_polls):
        serve, ray, config = SlowServe(num_polls), ModuleType("ray"), ModuleType("config")
        ray.serve, config.HTTPOptions = serve, dict
        for name, module in (("ray", ray), ("ray.serve", serve), ("ray.serve.config", config)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(launch, "application", lambda recipe: recipe)
        monkeypatch.setattr(launch, "POLL_S", 0.0)
        return serve

    return install


def test_a_start_waits_for_slow_proxies(slow_serve):
    serve = slow_serve(3)

    launch.start_serve(RECIPE)
    launch.run_application(RECIPE)

    assert serve.calls == ["start", "start", "run", *["status"] * 4]


def test_proxies_that_never_start_are_an_error(slow_serve, monkeypatch):
    slow_serve(None)
    monkeypatch.setattr(launch, "PROXY_WAIT_S", 0.01)

    with pytest.raises(EngineDead, match=r"HTTP proxy has not started .*: free cores"):
        launch.run_application(RECIPE)
