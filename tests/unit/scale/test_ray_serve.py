"""Options and starts of Ray Serve on a machine; Ray is replaced by a double."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from quire.errors import ConfigError, EngineDead, UnknownName
from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe
from quire.scale.serve import launch
from quire.scale.serve.builder import recipe_of
from quire.scale.serve.recipe import ServeRecipe
from quire.serve.config import KEY_VARIABLE


def test_texts_become_the_values_of_their_fields():
    texts = """model=quire-tiny kv-memory=64MiB enable-prefix-caching=false
        kv-offload-memory=1MiB max-num-seqs=8 served-model-name=tiny shutdown-timeout=2.5
        allowed-origins=https://a.example,https://b.example ray-replicas=1:4 router=least_loaded
        ray-cpus=2 dtype=float32 verify=false max_model_len=128"""
    recipe = recipe_of(dict(text.split("=") for text in texts.split()))

    options = recipe.engine.options
    assert options["kv"].memory == 64 * 2**20
    assert not options["kv"].prefix_cache.enabled
    assert options["kv"].offload.kv_memory == 2**20
    assert options["schedule"].max_num_seqs == 8
    assert options.items() >= {"dtype": "float32", "verify": False, "max_model_len": 128}.items()
    assert recipe.server.served_model_name == "tiny"
    assert recipe.server.shutdown_timeout == 2.5
    assert recipe.server.allowed_origins == ("https://a.example", "https://b.example")
    assert (recipe.ray.min_replicas, recipe.ray.max_replicas) == (1, 4)
    assert recipe.routing.name == "least_loaded"
    assert recipe.engine.threads == 2
    of_file = recipe_of({"model": "quire-tiny", "max-num-seqs": 8, "verify": False})
    assert of_file.engine.options["schedule"].max_num_seqs == 8
    assert of_file.engine.options["verify"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model=NAME"),
        ({"model": "m", "max-num-seqs": "many"}, "expected max-num-seqs as int, got 'many'"),
        ({"model": "m", "verify": "1"}, "expected verify as bool"),
        ({"model": "m", "port": 8000}, "HTTP options of Ray Serve"),
        ({"model": "m", "ray-replicas": "4:1"}, "MIN:MAX"),
        ({"model": "m", "kv-memory": "64"}, "kv-memory"),
        ({"model": "m", "kv-memori": "64MiB"}, "kv-memory"),
    ],
)
def test_wrong_options_are_refused(args, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        recipe_of(args)


def test_a_recipe_has_digests_of_keys_only(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-from-environment")

    recipe = recipe_of({"model": "m", "api-key": "sk-from-option"})
    sent = pickle.dumps(recipe)

    assert b"sk-from" not in sent
    for key in ("sk-from-environment", "sk-from-option"):
        assert pickle.loads(sent).keys.tenant_of(f"Bearer {key}") == "default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": "0"}, "ray-replicas"),
        ({"replicas": "a"}, "ray-replicas"),
        ({"object_store_memory": "10MiB"}, "80MiB"),
        ({"retries": -1}, "ray-retries"),
        ({"max_ongoing": 0}, "ray-max-ongoing"),
        ({"target_kv": 1.5}, "ray-target-kv"),
        ({"cpus": -1.0}, "ray-cpus"),
        ({"downscale_delay_s": -1.0}, "ray-downscale-delay"),
        ({"stats_period_s": 0.0}, "ray-stats-period"),
    ],
)
def test_wrong_options_of_ray_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RayConfig(**options)


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
