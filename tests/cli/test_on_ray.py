"""Options of Ray that a command refuses, before it starts Ray or loads a model."""

import importlib.util

import pytest

from support.command_line import write_lines

CONFIG_ERROR = 2


@pytest.mark.parametrize("option", ["--ray-replicas=2", "--router=least_loaded", "--ray-cpus=2"])
def test_options_of_ray_need_ray(quire, option):
    result = quire("serve", "quire-tiny", option)

    assert result.exit_code == CONFIG_ERROR
    assert f"{option.partition('=')[0]} has no effect without --ray: add --ray" in result.stderr


@pytest.mark.parametrize(
    "option", ["--kv-events=events.jsonl", "--kv-events-endpoint=tcp://127.0.0.1:5557"]
)
def test_options_of_one_engine_are_refused_with_ray(quire, option):
    result = quire("serve", "quire-tiny", "--ray", option)

    assert result.exit_code == CONFIG_ERROR
    assert f"{option.partition('=')[0]} is an option of one engine" in result.stderr


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
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "ray" else find(name)
    )
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    files = (source, tmp_path / "out.jsonl") if command == "batch" else ()

    result = quire(command, "quire-tiny", *files, "--ray")

    assert result.exit_code == CONFIG_ERROR
    assert f"quire {command} --ray needs ray" in result.stderr
    assert "quire-llm[ray]" in result.stderr
