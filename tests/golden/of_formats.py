"""Formats of files that Quire writes for itself and for users: prefixes, constants, rates, runs."""

import json
import sqlite3
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open

from golden.cases import stored
from golden.of_commands import batch_input
from golden.workshop import ENGINE_OPTIONS, Workshop, finish, greedy
from quire.cli.batch_files import BatchOutput, RunState, state_path
from quire.cli.options import SECTIONS, OptionField, configs_of, read_config_file
from quire.config.generation_request import DEFAULT_TENANT, GenerationRequest
from quire.kv.coded_layers import read_constants
from quire.layout.kv_format import read_format
from quire.offload.prefix_store.prefix_kv import read_file, write_file
from quire.offload.tiers.file import FileTier
from quire.plan.ceilings import Ceilings, Machine, ProductRate, read_ceilings, write_ceilings
from quire.plan.rates import CopyRate, CopyRates, DecodeRates, PrefillRates, StepRates
from quire.serve.tenant_keys import read_tenant_keys

MIB = 1 << 20


# ---- the file tier -----------------------------------------------------------------------------

_ROWS = "SELECT name, num_bytes, disk_bytes, facts, length(sums), file FROM entries ORDER BY name"
_INDEX = "index.sqlite3"


def _read_index(folder: Path, query: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(folder / _INDEX)
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def describe_tier(folder: Path) -> object:
    """The rows of the index, and how the file of each entry begins."""
    rows = _read_index(folder, _ROWS)
    secret = folder / "secret"
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "format": _read_index(folder, "PRAGMA user_version")[0][0],
        "entries": {
            str(n): {
                "name": name,
                "bytes": num_bytes,
                "disk_bytes": disk_bytes,
                "facts": json.loads(facts),
                "num_sums": sums_bytes // 4,
                "begins": list((folder / "entries" / file).read_bytes()[:8]),
            }
            for n, (name, num_bytes, disk_bytes, facts, sums_bytes, file) in enumerate(rows)
        },
        "secret_bytes": len(secret.read_bytes()) if secret.exists() else 0,
    }


def pack_tier(folder: Path) -> None:
    """Keep what may be committed: a small index without a log, and no lock."""
    database = sqlite3.connect(folder / _INDEX, isolation_level=None)
    for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
        database.execute(statement).fetchall()
    database.close()
    (folder / "lock").unlink()


def _read_tier(workshop: Workshop, folder: Path) -> object:
    tier = FileTier(folder, 3 * MIB)
    found = {key: asdict(entry) for key, entry in tier.stored().items()}
    into = bytearray(300)
    tier.read("a", memoryview(into))
    assert bytes(into) == _ENTRY
    tier.check()
    tier.close()
    return {"stored": found}


_ENTRY = bytes(i * 7 % 251 for i in range(300))


@stored(describe_tier, _read_tier, exact=("*.files", "*.facts.*"))
def file_tier(workshop: Workshop, folder: Path) -> None:
    tier = FileTier(folder, 3 * MIB)
    tier.write("a", _ENTRY, {"nature": "n", "keys": ["00ff"]})
    tier.write("b", _ENTRY)
    tier.drop("b")
    tier.close()
    pack_tier(folder)


_PREFIX = list(range(5, 18))  # three blocks, and a token behind them
_SMALLEST = {"page_tokens": 4, "codec": "int2", "disk_memory": "8MiB"}


def _read_prefixes(workshop: Workshop, folder: Path) -> object:
    """A new engine finds the blocks; their records begin with their tokens."""
    engine = workshop.engine(**_SMALLEST, disk_path=str(folder))
    store = engine.prefix_loader.tier.levels.stores[0]
    found = engine.stats().tier
    assert found.found_blocks, "the nature or the keys of stored prefixes have changed"
    engine.close()
    tier = FileTier(folder, 8 * MIB)
    [(key, entry)] = [item for item in tier.stored().items() if "keys" in item[1].facts]
    into = bytearray(entry.num_bytes)
    tier.read(key, memoryview(into))
    tier.close()
    records = [
        into[start : start + store.record_bytes]
        for start in range(0, len(into), store.record_bytes)
    ]
    tokens = [list(memoryview(record)[: 4 * 8].cast("q")) for record in records]
    return {"found_blocks": found.found_blocks, "record_bytes": store.record_bytes, "ids": tokens}


@stored(describe_tier, _read_prefixes, exact=("*.files", "*.facts.*", "written.entries.*.name"))
def file_prefixes(workshop: Workshop, folder: Path) -> None:
    """What an engine leaves there; the secret is set, so that a salt is the same everywhere."""
    (folder / "secret").write_bytes(bytes(range(32)))
    engine = workshop.engine(**_SMALLEST, disk_path=str(folder))
    engine.submit(GenerationRequest(_PREFIX, greedy(1)))
    finish(engine)
    engine.close()
    pack_tier(folder)


# ---- exported KV -------------------------------------------------------------------------------


def _describe_export(folder: Path) -> object:
    with safe_open(folder / "prefix.safetensors", framework="pt") as file:
        described = json.loads(file.metadata()["quire"])
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            "metadata": described,
            "tensors": {
                name: {"shape": part.get_shape(), "dtype": part.get_dtype()}
                for name, part in tensors.items()
            },
        }


def _read_export(workshop: Workshop, folder: Path) -> object:
    kv = read_file(folder / "prefix.safetensors")
    engine = workshop.engine(page_tokens=4, codec="int2")
    found = engine.kv_export.insert(kv, tenant=DEFAULT_TENANT, cache_salt="")
    engine.close()
    return {"tokens": kv.tokens.tolist(), "inserted": asdict(found)}


@stored(
    _describe_export,
    _read_export,
    exact=("*.options.*", "*.dtype", "*.fingerprint"),
    loose=("*.sums.*",),
)
def exported_kv(workshop: Workshop, folder: Path) -> None:
    engine = workshop.engine(page_tokens=4, codec="int2")
    request = GenerationRequest(_PREFIX, greedy(1))
    engine.submit(request)
    finish(engine)
    kv, _ = engine.kv_export.gather(request)
    engine.close()
    write_file(kv, folder / "prefix.safetensors")


# ---- what is measured --------------------------------------------------------------------------

_CODECS = "int8_channel/int4:equalise=1"


def _describe_constants(folder: Path) -> object:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found[path.relative_to(folder).as_posix()] = {
                "metadata": file.metadata(),
                "tensors": {
                    name.replace(".", "/"): {"shape": part.get_shape(), "dtype": part.get_dtype()}
                    for name, part in tensors.items()
                },
            }
    return found


def _read_constants(workshop: Workshop, folder: Path) -> object:
    measured = read_constants(folder, read_format(_CODECS), workshop.model.spec)
    return {
        "digest": measured.digest,
        "layers": len(measured.layers),
        "names": sorted({name for constants in measured.layers.values() for name in constants}),
    }


@stored(
    _describe_constants,
    _read_constants,
    exact=("*.metadata.*", "*.dtype", "read.digest", "read.names"),
)
def measured_constants(workshop: Workshop, folder: Path) -> None:
    """As `quire calibrate` leaves them."""
    workshop.run(
        *("calibrate", "quire-tiny", "--tokens=64", "--threads=1"),
        *("--kv-codec", _CODECS, "--output", folder),
    )


_MACHINE = Machine(cpu="a processor", threads=1, torch="2.0")
_COPY = CopyRate(bytes_per_s=1e9, call_s=1e-4, piece_s=1e-6)
_PREFILL = PrefillRates(token_s=1e-4, square_s=1e-8, call_s=1e-3)
_CEILINGS = Ceilings(
    machine=_MACHINE,
    read_bytes_per_s=20e9,
    copy_bytes_per_s=10e9,
    products=(ProductRate(dtype="bfloat16", rows=1, inner=8, columns=16, flops_per_s=1e9),),
    copies={"cpu": CopyRates(out=_COPY, back=_COPY)},
    prefill={"a model, bfloat16, cpu": _PREFILL},
    steps={
        "a model, bfloat16, cpu; full": StepRates(
            whole=_PREFILL,
            blocks=_PREFILL,
            decode=DecodeRates(
                batch_s=((1, 0.01), (8, 0.02)), slot_s=1e-7, evict_row_s=1e-4, evict_slot_s=1e-6
            ),
        )
    },
)


def _describe_ceilings(folder: Path) -> object:
    return json.loads((folder / "ceilings.json").read_text(encoding="utf-8"))


def _read_ceilings(workshop: Workshop, folder: Path) -> object:
    assert read_ceilings(folder / "ceilings.json", _MACHINE) == _CEILINGS
    return asdict(_CEILINGS)


@stored(_describe_ceilings, _read_ceilings, exact=("*",))
def ceilings(workshop: Workshop, folder: Path) -> None:
    """Every rate that `quire profile` stores."""
    write_ceilings(_CEILINGS, folder / "ceilings.json")


# ---- files of the user -------------------------------------------------------------------------


def _describe_toml(folder: Path) -> object:
    [path] = folder.iterdir()
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _read_config(workshop: Workshop, folder: Path) -> object:
    model, values = read_config_file(folder / "quire.toml")
    return {"model": model, "values": values}


@stored(_describe_toml, _read_config, exact=("*",))
def config_file(workshop: Workshop, folder: Path) -> None:
    """Every option in its table."""
    lines = []
    for section in SECTIONS:
        for names, _ in configs_of(section):
            lines.append(f"[{'.'.join(names)}]")
            lines += ['name = "quire-tiny"'] if section.name == "model" else []
            inside = [o for o in section.options() if o.path[:-1] == names[1:]]
            lines += [f"{found.name} = {_toml_of(found)}" for found in inside]
    (folder / "quire.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml_of(found: OptionField) -> str:
    samples: dict[object, object] = {str: "x", int: 1, float: 0.5, bool: True}
    value = samples.get(found.kind, ["x"]) if found.default is None else found.default
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _read_keys(workshop: Workshop, folder: Path) -> object:
    return dict(read_tenant_keys(folder / "tenants.toml").keys)


@stored(_describe_toml, _read_keys, exact=("*",))
def tenant_keys(workshop: Workshop, folder: Path) -> None:
    """One key, and several."""
    text = 'red = ["sk-red-00000000", "sk-red-11111111"]\nblue = "sk-blue-00000000"\n'
    (folder / "tenants.toml").write_text(text, encoding="utf-8")


# ---- a batch that was killed -------------------------------------------------------------------

_LINES = ("plain", "completion", "chat", "plain_error")


def _describe_batch(folder: Path) -> object:
    *whole, torn = (folder / "out.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in whole]
    state = json.loads((folder / "out.jsonl.state").read_text(encoding="utf-8"))
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "records": {str(record["line"]): record for record in records},
        "torn": bool(torn),
        "state": state,
    }


def _read_batch(workshop: Workshop, folder: Path) -> object:
    """The run goes on: what was answered stays byte for byte, the other lines are answered."""
    path = folder / "out.jsonl"
    before = path.read_bytes().rpartition(b"\n")[0]
    state = json.loads(state_path(path).read_text(encoding="utf-8"))
    current = RunState(**state | {"seed": 1})
    with BatchOutput(path, folder / "in.jsonl", current, overwrite=False) as output:
        assert output.seed == state["seed"] != 1, "lines that are left would draw other tokens"
    run: Any = workshop.run("batch", "quire-tiny", folder / "in.jsonl", path, *_BATCH, exit_code=1)
    after = path.read_bytes()
    assert after.startswith(before + b"\n")
    lines = [json.loads(line)["line"] for line in after.splitlines()]
    return {"claims": run["claims"], "lines": sorted(lines)}


_BATCH = (*ENGINE_OPTIONS, "--kv-memory=2MiB", "--temperature=0", "--seed=7")


@stored(_describe_batch, _read_batch, exact=("*.files", "*.input_sha256", "*.custom_id"))
def batch_output(workshop: Workshop, folder: Path) -> None:
    paths = (batch_input(folder / "in.jsonl", _LINES), folder / "out.jsonl")
    workshop.run("batch", "quire-tiny", *paths, *_BATCH, exit_code=1)
    records = sorted(
        (folder / "out.jsonl").read_bytes().splitlines(), key=lambda line: json.loads(line)["line"]
    )
    left = records[0] + b"\n" + records[1] + b"\n" + records[2][: len(records[2]) // 2]
    (folder / "out.jsonl").write_bytes(left)
