"""The command: every type of Transformers' mapping, resumable by type."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from models.cases import EQUAL, FAILED, NOT_TESTED, PLAIN, REFUSED, Found, run_type
from models.tiny import TYPES

RESULTS = Path("docs/results/models.json")
ENDED = "the process ended in this type"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run types; the exit status is 1 where one failed or was not tested."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted = asked.types or list(TYPES)
    if unknown := sorted(set(wanted) - set(TYPES)):
        raise SystemExit(f"{', '.join(unknown)}: not in Transformers' mapping")
    if asked.write:
        return write(asked.out)
    done = {} if asked.again else read(asked.out)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for model_type in wanted:
        if model_type not in done or (asked.mend and done[model_type]["result"] in _OPEN):
            _append(asked.out, Found(type=model_type, result=FAILED, why=ENDED).as_dict())
            done[model_type] = run_type(model_type, asked.cases).as_dict()
            _append(asked.out, done[model_type])
        print(line(done[model_type]), flush=True)
    found = [done[model_type] for model_type in wanted]
    print(", ".join(f"{count} {name}" for name, count in totals(found).items()))
    print(json.dumps({"totals": totals(found), "types": found}))
    return int(any(one["result"] in _OPEN for one in found))


_OPEN = (FAILED, NOT_TESTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.models.sweep", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/models.jsonl"))
    parser.add_argument("--cases", nargs="+", help="names of cases; default: all")
    parser.add_argument("--again", action="store_true", help="repeat types that the file has")
    parser.add_argument("--mend", action="store_true", help="repeat types that failed")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS} from --out")
    return parser


def _append(path: Path, found: Mapping[str, object]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(found) + "\n")


def line(found: Mapping) -> str:
    if found["result"] == EQUAL:
        return f"{found['type']}: equal (at most {found['worst']:.1e}; control: {found['control']})"
    kind = found["result"] if found["is_text_decoder"] else "refused, not a text decoder"
    return f"{found['type']}: {kind} ({found['why']})"


def totals(found: Iterable[Mapping]) -> dict[str, int]:
    counted = Counter(
        one["result"] if one["is_text_decoder"] else "not text decoders" for one in found
    )
    names = (EQUAL, REFUSED, FAILED, NOT_TESTED, "not text decoders")
    return {"types": sum(counted.values()), **{name: counted[name] for name in names}}


def write(path: Path) -> int:
    """Write the committed results; 1 if a type is missing."""
    done = read(path)
    found = [done[model_type] for model_type in TYPES if model_type in done]
    head = {"transformers": transformers.__version__, "totals": totals(found)}
    lines = ",\n  ".join(json.dumps(_stored(one), ensure_ascii=False) for one in found)
    RESULTS.write_text(f'{json.dumps(head)[:-1]},\n "types": [\n  {lines}\n ]}}\n')
    print(json.dumps(head["totals"]))
    return int(len(found) < len(TYPES))


def _stored(found: Mapping) -> dict[str, object]:
    """A type in the committed results: without times, with rounded differences."""
    kept = {name: value for name, value in found.items() if name != "seconds"}
    cases = {name: _rounded(case) for name, case in found["cases"].items()}
    kept["worst"] = max((c["worst"] for name, c in cases.items() if name not in PLAIN), default=0.0)
    return {**_rounded(kept), "cases": cases}


def _rounded(found: Mapping) -> dict[str, object]:
    return {
        name: float(f"{value:.1e}") if isinstance(value, float) else value
        for name, value in found.items()
    }


def read(path: Path) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[record["type"]] = record
    return found
