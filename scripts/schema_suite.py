"""`make schema-suite`: runs the official JSON Schema test suite and writes its table into `docs/structured-output.md`."""

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from onward.sim import vocabulary  # noqa: E402
from onward.text.tokenizer import Tokenizer  # noqa: E402
from tests.grammar.schema_suite import RELEASE, FileResult, run_all  # noqa: E402

PAGE = ROOT / "docs" / "structured-output.md"
BEGIN, END = "<!-- schema-suite -->", "<!-- /schema-suite -->"


def table(results: list[FileResult]) -> str:
    lines = ["| file | schemas | refused | valid instances allowed | invalid ones allowed |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.name} | {one.num_schemas} | {len(one.refused)} | {one.num_valid_allowed} of {one.num_valid} | "
        f"{len(one.wrongly_allowed)} of {one.num_invalid} |"
        for one in results
    ]
    total = [sum(counts) for counts in zip(*(_counts(one) for one in results), strict=True)]
    lines.append(f"| **all** | {total[0]} | {total[1]} | {total[2]} of {total[3]} | {total[4]} of {total[5]} |")
    return "\n".join([*lines, "", f"(`jsonschema` {RELEASE})", "", *reasons(results)])


def _counts(one: FileResult) -> tuple[int, ...]:
    valid, invalid = (one.num_valid_allowed, one.num_valid), (len(one.wrongly_allowed), one.num_invalid)
    return (one.num_schemas, len(one.refused), *valid, *invalid)


def reasons(results: list[FileResult]) -> list[str]:
    """What errors name, and of how many schemas."""
    counts = Counter(reason for one in results for problem in one.refused for reason in _reasons(problem))
    return ["Refused, by what the error names:", "", *(f"* {count} × {what}" for what, count in counts.most_common())]


def _reasons(problem: str) -> list[str]:
    if found := re.match(r"Unimplemented keys: \[(.*)\]", problem):
        return [f"`{key}`" for key in re.findall(r'"([^"]+)"', found[1])]
    if problem.startswith("$ref: Resource"):
        return ["`$ref` to another document"]
    return [re.sub(r"(: | for | regexes | constraints |\().*", "", problem)]


def main() -> None:
    results = run_all(vocabulary.grammars(), Tokenizer(vocabulary.model_text().tokenizer or ""))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
