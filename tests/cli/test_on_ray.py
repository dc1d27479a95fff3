"""Options of Ray that a command refuses, before it starts Ray or loads a model."""

import importlib.util

import pytest

from support.command_line import write_lines

CONFIG_ERROR = 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ray-replicas=2", "has no effect without --ray: add --ray"),
        ("--router=least_loaded", "has no effect without --ray: add --ray"),
        ("--ray-cpus=2", "has no effect without --ray: add --ray"),
        ("--kv-events=events.jsonl", "is an option of one engine"),
        ("--kv-events-endpoint=tcp://127.0.0.1:5557", "is an option of one engine"),
    ],
)
def test_options_of_ray_need_ray_and_those_of_one_engine_none(quire, option, message):
    ray = ("--ray",) if "engine" in message else ()
    result = quire("serve", "quire-tiny", *ray, option)
    assert result.exit_code == CONFIG_ERROR
    assert f"{option.partition('=')[0]} {message}" in result.stderr


def test_a_batch_runs_on_ray_or_on_a_server(quire, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    files = (source, tmp_path / "out.jsonl")

    both = quire("batch", "m", *files, "--ray", "--base-url=http://127.0.0.1:1")
    alone = quire("batch", "m", *files, "--ray-replicas=2")

    assert both.exit_code == alone.exit_code == CONFIG_ERROR
    assert "--base-url is an option of one engine" in both.stderr
    assert "--ray-replicas has no effect without --ray" in alone.stderr


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_without_ray_the_error_names_the_extra(quire, command, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    without = "importlib.util.find_spec"
    monkeypatch.setattr(without, lambda name: None if name == "ray" else find(name))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    files = (source, tmp_path / "out.jsonl") if command == "batch" else ()

    result = quire(command, "quire-tiny", *files, "--ray")

    assert result.exit_code == CONFIG_ERROR
    assert f"quire {command} --ray needs ray" in result.stderr
    assert "quire-llm[ray]" in result.stderr
