"""The official JSON Schema test suite against our grammars: which schemas are refused, and whether any is not kept.

A grammar may allow less than its schema (it has one order of properties and one way to write JSON) and never more: an
instance that the suite calls invalid must not be an output. The suite lies in the source archive of `jsonschema`, which
is fetched once into the cache folder, and is no part of this project.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.config import cache_dir
from onward.grammar.grammar_compiler import GrammarCompiler
from onward.grammar.grammar_errors import GrammarLimitExceeded, InvalidGrammar, TokenNotAllowed
from onward.proto.sampling_params import Grammar
from onward.text.tokenizer import Tokenizer

RELEASE = "4.26.0"
DIGEST = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
MEMBERS = f"jsonschema-{RELEASE}/json/tests/draft2020-12/"


def fetched() -> Path:
    """The folder with the suite's files for draft 2020-12; those of optional features are not among them."""
    folder = cache_dir() / f"json-schema-suite-{RELEASE}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            _extract(_download(Path(unfinished)), Path(unfinished) / "suite")
            (Path(unfinished) / "suite").rename(folder)
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*command, f"jsonschema=={RELEASE}", "--dest", str(folder)], check=True, timeout=300)
    [archive] = folder.glob("jsonschema-*.tar.gz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == DIGEST, f"{archive.name} is not the archive that is meant: {found}"
    return archive


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.removeprefix(MEMBERS)
            if member.isfile() and name != member.name and "/" not in name:
                source = members.extractfile(member)
                assert source is not None
                (folder / name).write_bytes(source.read())


def run_all(grammars: GrammarCompiler, tokenizer: Tokenizer) -> "list[FileResult]":
    return [run_file(path, grammars, tokenizer) for path in sorted(fetched().glob("*.json"))]


@dataclass(slots=True)
class FileResult:
    name: str
    num_schemas: int = 0
    refused: list[str] = field(default_factory=list)
    """What each refused schema's error says."""
    unnamed: list[str] = field(default_factory=list)
    """Refusals that name nothing of the schema."""
    num_valid: int = 0
    num_valid_allowed: int = 0
    num_invalid: int = 0
    wrongly_allowed: list[str] = field(default_factory=list)
    """Invalid instances that could be an output."""


def run_file(path: Path, grammars: GrammarCompiler, tokenizer: Tokenizer) -> FileResult:
    result = FileResult(path.stem)
    for group in json.loads(path.read_text(encoding="utf-8")):
        schema = group["schema"]
        result.num_schemas += 1
        grammar = Grammar("json_schema", json.dumps(schema))
        try:
            grammars.check(grammar)
        except InvalidGrammar as refused:
            result.refused.append(str(refused))
            if not _names_something(str(refused), schema):
                result.unnamed.append(f"{group['description']}: {refused}")
            continue
        _run_instances(result, group, grammar, grammars, tokenizer)
    return result


def _run_instances(
    result: FileResult, group: dict[str, Any], grammar: Grammar, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for test in group["tests"]:
        is_allowed = _can_be_output(test["data"], grammar, grammars, tokenizer)
        if test["valid"]:
            result.num_valid += 1
            result.num_valid_allowed += is_allowed
        else:
            result.num_invalid += 1
            if is_allowed:
                result.wrongly_allowed.append(f"{group['description']}: {test['description']}")


def _can_be_output(data: Any, grammar: Grammar, grammars: GrammarCompiler, tokenizer: Tokenizer) -> bool:
    """Byte by byte, as no model would write it: whole tokens come to the same bytes. What is left to one token only is
    taken as it is."""
    matcher, left = grammars.matcher(grammar), json.dumps(data, ensure_ascii=False).encode()
    pieces = tokenizer.table.token_bytes_list
    try:
        while left:
            if matcher.done:
                return False
            fitting = [one for one in matcher.mask().token_ids() if pieces[one] and left.startswith(pieces[one])]
            if not fitting:
                return False
            token_id = min(fitting, key=lambda one: len(pieces[one]))
            matcher.advance(token_id)
            left = left[len(pieces[token_id]) :]
        return matcher.done or matcher.mask().may_end
    except (TokenNotAllowed, GrammarLimitExceeded):
        return False


def _names_something(problem: str, schema: Any) -> bool:
    """Or of what it refers to: a keyword, a format, an address, or the schema `false`."""
    return "$" in problem or "false" in problem or any(word in problem for word in _words(schema))


def _words(schema: Any) -> Iterable[str]:
    """Keywords and strings of a schema."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            yield name
            yield from _words(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _words(one)
    elif isinstance(schema, str) and schema:
        yield schema
