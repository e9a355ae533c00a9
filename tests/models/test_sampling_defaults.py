import json
from pathlib import Path
from typing import Any

import pytest

from onward.errors import StartupError
from onward.models.loader.generation_config import read_sampling_defaults
from onward.proto.model import SamplingDefaults


def written(folder: Path, **said: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def test_a_checkpoint_says_how_it_is_to_be_sampled(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "min_p": None}
    assert read_sampling_defaults(written(tmp_path, **said)) == SamplingDefaults(0.6, 0.95, 20, None, 1.1)


def test_one_that_says_nothing_has_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    assert read_sampling_defaults(written(tmp_path, eos_token_id=2)) == SamplingDefaults()


@pytest.mark.parametrize(
    "said",
    [{"temperature": "hot"}, {"temperature": 3}, {"top_p": 0}, {"top_k": 1.5}, {"top_k": -1}, {"min_p": True}],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name_and_with_a_way_out(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=f"{next(iter(said))}: .*--generation-config none"):
        read_sampling_defaults(written(tmp_path, **said))
