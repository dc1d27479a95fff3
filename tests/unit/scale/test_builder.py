"""Options of `serve run`: texts and values, by the names of flags."""

import pickle

import pytest

from quire.errors import ConfigError, UnknownName
from quire.scale.config import RayConfig
from quire.scale.serve.builder import recipe_of
from quire.serve.config import KEY_VARIABLE


def test_texts_become_the_values_of_their_fields():
    recipe = recipe_of(
        {
            "model": "quire-tiny",
            "kv-memory": "64MiB",
            "enable-prefix-caching": "false",
            "kv-offload-memory": "1MiB",
            "max-num-seqs": "8",
            "served-model-name": "tiny",
            "shutdown-timeout": "2.5",
            "allowed-origins": "https://a.example,https://b.example",
            "ray-replicas": "1:4",
            "router": "least_loaded",
            "ray-cpus": "2",
            "dtype": "float32",
            "verify": "false",
            "max_model_len": "128",
        }
    )

    options = recipe.engine.options
    assert options["kv"].memory == 64 * 2**20
    assert not options["kv"].prefix_cache.enabled
    assert options["kv"].offload.kv_memory == 2**20
    assert options["schedule"].max_num_seqs == 8
    assert (options["dtype"], options["verify"], options["max_model_len"]) == (
        *("float32", False, 128),
    )
    assert recipe.server.served_model_name == "tiny"
    assert recipe.server.shutdown_timeout == 2.5
    assert recipe.server.allowed_origins == ("https://a.example", "https://b.example")
    assert (recipe.ray.min_replicas, recipe.ray.max_replicas) == (1, 4)
    assert recipe.routing.name == "least_loaded"
    assert recipe.engine.threads == 2


def test_values_of_a_configuration_file_are_accepted():
    recipe = recipe_of({"model": "quire-tiny", "max-num-seqs": 8, "verify": False})

    assert recipe.engine.options["schedule"].max_num_seqs == 8
    assert recipe.engine.options["verify"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model=NAME"),
        ({"model": "m", "max-num-seqs": "many"}, "expected max-num-seqs as int, got 'many'"),
        ({"model": "m", "verify": "1"}, "expected verify as bool"),
        ({"model": "m", "port": 8000}, "HTTP options of Ray Serve"),
        ({"model": "m", "ray-replicas": "4:1"}, "MIN:MAX"),
        ({"model": "m", "kv-memory": "64"}, "kv-memory"),
    ],
)
def test_wrong_options_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        recipe_of(args)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownName, match="kv-memory"):
        recipe_of({"model": "m", "kv-memori": "64MiB"})


def test_a_recipe_has_digests_of_keys_only(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-from-environment")

    recipe = recipe_of({"model": "m", "api-key": "sk-from-option"})
    sent = pickle.dumps(recipe)

    assert b"sk-from" not in sent
    keys = pickle.loads(sent).keys
    assert keys.tenant_of("Bearer sk-from-environment") == "default"
    assert keys.tenant_of("Bearer sk-from-option") == "default"


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
