"""What a command line composes to: files, overrides, defaults, interpolations; and the file that is saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.core.build import build
from nemo_like.core.choices import Chooser
from nemo_like.core.compose import Composed, compose, load_composed
from nemo_like.core.config import Component, RunConfig
from nemo_like.core.errors import ConfigError
from nemo_like.core.layers import load_yaml
from nemo_like.core.library import SHIPPED, open_library
from nemo_like.core.overrides import parse_override

RUN = """\
# @package _global_
# A run that is checked and never started.
name: tiny
trainer: {max_steps: 10}
model:
  _target_: nemo_like.collections.llm.decoder.DecoderModel
  network: {vocab_size: 100, hidden_size: 64, num_layers: 2, num_heads: 4,
            intermediate_size: 128, max_positions: 64}
data: {_target_: nemo_like.optim.AdamW, lr: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "llm/tiny", RUN)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    file = folder / "conf" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def compose_tiny(*arguments: str) -> Composed:
    return compose("pretrain", ["--config-dir=.", "+conf=llm/tiny", *arguments])


def test_the_schema_owns_the_defaults_at_every_depth(folder: Path) -> None:
    composed = compose_tiny()
    assert isinstance(composed.config, RunConfig)
    assert composed.config.trainer.precision == "fp32"
    assert composed.tree["model"]["network"]["norm_eps"] == 1e-5
    assert composed.tree["optim"]["betas"] == [0.9, 0.95]
    assert composed.config.model["network"].rope_theta == 10000.0
    assert isinstance(composed.config.optim, Component)


def test_interpolations_see_defaults_and_overrides(folder: Path) -> None:
    composed = compose_tiny(
        "trainer.max_steps=7", "name=a${seed}", "run_dir=out/${name}-${trainer.devices}"
    )
    assert composed.config.schedule["total_steps"] == 7
    assert composed.config.run_dir == "out/a0-auto"


def test_a_run_chooses_groups_and_a_command_line_has_the_last_word(folder: Path) -> None:
    head = "# @package _global_\ndefaults:\n  - override /optim: muon\n  - override /schedule: linear\n"
    write(folder, "llm/tiny", head + RUN)
    assert compose_tiny().config.optim["_target_"] == "nemo_like.optim.Muon"
    composed = compose_tiny("optim=adamw")
    assert composed.config.optim["_target_"] == "nemo_like.optim.AdamW"
    assert composed.config.schedule["_target_"] == "nemo_like.optim.LinearSchedule"


def test_a_run_adds_to_what_a_group_says(folder: Path) -> None:
    write(folder, "llm/tiny", RUN + "optim: {weight_decay: 0.25}\n")
    optim = compose_tiny().config.optim
    assert (optim["_target_"], optim["weight_decay"]) == ("nemo_like.optim.AdamW", 0.25)


def test_a_run_may_build_on_another(folder: Path) -> None:
    write(
        folder,
        "llm/longer",
        "# @package _global_\ndefaults: [llm/tiny, _self_]\ntrainer: {max_steps: 99}\n",
    )
    config = compose("pretrain", ["--config-dir", ".", "+conf=llm/longer"]).config
    assert (config.name, config.trainer.max_steps) == ("tiny", 99)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=b=c=d", "name", "b=c=d"),
        ("name=00012", "name", "00012"),
        ("name=1e3", "name", "1e3"),
        ("name=12", "name", "12"),
        ("name=true", "name", "true"),
        ("name='12'", "name", "12"),
        ("name=\"'null'\"", "name", "'null'"),
        ("name='null'", "name", "null"),
        ("name=it's", "name", "it's"),
        ("name=x y", "name", "x y"),
        ("run_dir=~/a,b", "run_dir", "~/a,b"),
        ("seed=1_000", "seed", 1000),
        ("+seed=3", "seed", 3),
        ("++seed=3", "seed", 3),
        ("resume=never", "resume", "never"),
    ],
)
def test_overrides_are_taken_as_typed(folder: Path, override: str, key: str, value: Any) -> None:
    found = getattr(compose_tiny(override).config, key)
    assert (found, type(found)) == (value, type(value))


def test_whole_numbers_pass_as_numbers_and_null_as_none(folder: Path) -> None:
    trainer = compose_tiny(
        "trainer.gradient_clip_norm=2", "trainer.devices=2", "trainer.threads=null"
    ).config.trainer
    assert (trainer.gradient_clip_norm, type(trainer.gradient_clip_norm)) == (2.0, float)
    assert (trainer.devices, trainer.threads) == (2, None)
    assert compose_tiny("trainer.gradient_clip_norm=null").config.trainer.gradient_clip_norm is None


def test_the_last_of_two_equal_overrides_wins(folder: Path) -> None:
    assert compose_tiny("seed=1", "seed=2").config.seed == 2


def test_lists_mappings_indices_and_deletion(folder: Path) -> None:
    composed = compose_tiny(
        "optim.betas=[0.5,0.6]", "optim.betas[1]=0.7", "checkpoint={keep_last:5,mode:max}"
    )
    assert composed.config.optim["betas"] == [0.5, 0.7]
    assert (composed.config.checkpoint.keep_last, composed.config.checkpoint.mode) == (5, "max")
    extra = "+callbacks.more={_target_:nemo_like.optim.AdamW,lr:1}"
    names = set(compose_tiny(extra, "~callbacks.report").config.callbacks)
    assert {"progress", "more"} <= names
    assert "report" not in names
    assert compose_tiny("~callbacks").config.callbacks == {}


def test_a_key_of_digits_is_text_in_a_mapping_and_an_index_in_a_list(folder: Path) -> None:
    data = (
        "{_target_:nemo_like.collections.llm.TextDataModule,corpus:a,seq_len:8,global_batch_size:1}"
    )
    data_keys = ["~data", f"data={data}", "data.tokenizer.train_vocab_size=300"]
    config = compose_tiny(
        *data_keys, "data.mixture.weights.2024=1", "data.mixture.weights.007=2"
    ).config
    assert config.data["mixture"].weights == {"2024": 1.0, "007": 2.0}


def test_folders_with_odd_names_are_searched(folder: Path) -> None:
    odd = folder / "it's, a=b [c] ü"
    write(odd, "llm/other", RUN)
    assert compose("pretrain", [f"--config-dir={odd}", "+conf=llm/other"]).config.name == "tiny"


def test_a_search_path_of_hydra_works_as_well(folder: Path) -> None:
    path = f"hydra.searchpath=[pkg://nemo_like,file://{folder}]"
    assert compose("pretrain", ["+conf=llm/tiny", path]).config.name == "tiny"
    assert compose("pretrain", ["+conf=llm/tiny", f"hydra.searchpath=[file://{folder}]"])


def order_with_hydra(config_name: str, lines: list[str], folder: Path) -> list[tuple[str, str]]:
    """Hydra's compose API, reading the files itself."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    path = f"hydra.searchpath=['file://{folder}','pkg://nemo_like']"
    with initialize_config_module("nemo_like.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list(config_name, [path, *lines], RunMode.RUN).defaults
    return [
        (it.config_path, it.package or "") for it in found if not it.config_path.startswith("hydra")
    ]


NESTED = """\
# @package _global_
defaults:
  - llm/tiny
  - _self_
  - optional /nothing: here
  - /mine: [one, two]
  - /mine@_global_: ${conf}
  - override /schedule: linear
"""


def test_files_come_in_the_order_of_hydras_own_compose(folder: Path) -> None:
    write(folder, "llm/nested", NESTED)
    (folder / "mine" / "llm").mkdir(parents=True)
    (folder / "mine" / "one.yaml").write_text("# @package optim\ndefaults: [llm/deep, _self_]")
    for name in ("two", "llm/nested", "llm/deep"):
        (folder / "mine" / f"{name}.yaml").write_text("seed: 1")
    library = open_library(["pkg://nemo_like"], ["."])[0]
    choices = [[f"+conf={run}"] for run in library.runs()]
    choices.append(["+conf=llm/nested", "optim=muon", "+mine@model=two", "trainer=debug"])
    assert ["+conf=llm/nested"] in choices
    primary = load_yaml(SHIPPED / "pretrain.yaml", "pretrain.yaml")
    for lines in choices:
        chooser = Chooser("pretrain", primary, library)
        chosen = chooser.choose([parse_override(line) for line in lines])
        assert chooser.faults == []
        assert chosen == order_with_hydra("pretrain", lines, folder)


def test_an_option_may_be_called_no(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "no.yaml").write_text("seed: 7")
    write(folder, "llm/mine", RUN + "defaults: [/mine@_global_: no, /conf/llm/tiny, _self_]")
    assert compose("pretrain", ["--config-dir=.", "+conf=llm/mine"]).config.seed == 7


def test_an_own_run_comes_before_a_shipped_one_of_its_name(folder: Path) -> None:
    write(folder, "llm/quickstart", RUN)
    assert compose("pretrain", ["--config-dir=.", "+conf=llm/quickstart"]).config.name == "tiny"


def test_a_run_of_overrides_alone_needs_no_file(folder: Path) -> None:
    component = "{_target_:nemo_like.optim.AdamW,lr:1}"
    lines = [f"model={component}", f"data={component}", "name=x", "trainer.max_steps=1"]
    assert compose("pretrain", [*lines]).config.name == "x"


def test_the_saved_file_gives_the_same_configuration_again(folder: Path) -> None:
    composed = compose_tiny(
        "name=00012", "checkpoint.monitor=1e3", "optim.lr=1e-7", "run_dir='yes'"
    )
    (folder / "config.yaml").write_text(composed.yaml)
    again = load_composed(folder / "config.yaml")
    assert again.tree == composed.tree
    assert again.config == composed.config
    assert again.config.name == "00012"


def test_other_readers_of_yaml_find_the_same_in_the_saved_file(folder: Path) -> None:
    from omegaconf import OmegaConf

    composed = compose_tiny("name=00012", "checkpoint.monitor=1e3", "run_dir=no")
    (folder / "config.yaml").write_text(composed.yaml)
    read = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert read == {"_schema_": "nemo_like.core.config.RunConfig", **composed.tree}


def test_a_saved_file_that_does_not_fit_is_refused(folder: Path) -> None:
    text = compose_tiny().yaml
    (folder / "config.yaml").write_text(text.replace("max_steps: 10", "max_stepz: 10"))
    with pytest.raises(
        ConfigError, match=r"config.yaml:\d+: trainer.max_stepz: no such key; did you"
    ):
        load_composed(folder / "config.yaml")
    (folder / "config.yaml").write_text("name: x\n")
    with pytest.raises(
        ConfigError, match=r"config.yaml: has no _schema_: no run has saved this file"
    ):
        load_composed(folder / "config.yaml")


def test_another_run_dir_reaches_what_was_derived_from_it(folder: Path) -> None:
    composed = compose_tiny(
        "+callbacks.more={_target_:nemo_like.tracking.logger.JsonlLogger,folder:'${run_dir}/x'}"
    )
    moved = composed.replace_run_dir(Path("elsewhere"))
    assert moved.config.run_dir == "elsewhere"
    assert moved.config.callbacks["more"]["folder"] == "elsewhere/x"
    assert composed.config.callbacks["more"]["folder"] == "runs/tiny/x"


def test_a_composed_component_is_built_by_its_key(folder: Path) -> None:
    composed = compose_tiny("schedule.warmup_steps=5")
    schedule = composed.build("schedule")
    assert schedule(5) == 1.0
    assert build(composed.config.schedule)(5) == 1.0


def test_the_start_time_is_the_same_in_every_process(folder: Path) -> None:
    code = (
        "import sys; from nemo_like.core.compose import compose;"
        "print(compose('pretrain', sys.argv[1:]).config.run_dir)"
    )
    arguments = ["--config-dir=.", "+conf=llm/tiny", "run_dir=runs/${now:%Y-%m-%d_%H-%M-%S}"]
    env = {**os.environ, "NEMO_LIKE_AGREED_START_TIME": "2026-01-02_03-04-05"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "runs/2026-01-02_03-04-05\n"


def test_composing_loads_no_torch(folder: Path) -> None:
    code = (
        "import json, sys; from nemo_like.core.compose import compose; compose('pretrain', sys.argv[1:]);"
        "print(json.dumps([m for m in ('torch', 'lightning', 'numpy', 'transformers') if m in sys.modules]))"
    )
    arguments = ["--config-dir=.", "+conf=llm/tiny"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
