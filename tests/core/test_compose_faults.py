"""Every kind of mistake in a configuration: one line with its place, what is allowed, and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.core.compose import compose
from nemo_like.core.errors import ConfigError

RUN = """\
# @package _global_
# A run that is checked and never started.
name: tiny
trainer:
  max_steps: 10
model:
  _target_: nemo_like.collections.llm.decoder.DecoderModel
  network:
    vocab_size: 100
    hidden_size: 64
    num_layers: 2
    num_heads: 4
    intermediate_size: 128
    max_positions: 64
data:
  _target_: nemo_like.optim.AdamW
  lr: 1
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


def faults(*arguments: str, run: str = "+conf=llm/tiny") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose("pretrain", ["--config-dir", ".", run, *arguments])
    return caught.value.faults


def fault(*arguments: str, run: str = "+conf=llm/tiny") -> str:
    (only,) = faults(*arguments, run=run)
    return only


def test_the_run_itself_has_no_fault(folder: Path) -> None:
    assert compose("pretrain", ["--config-dir", ".", "+conf=llm/tiny"]).config.name == "tiny"


def test_unknown_key_in_a_run_file_names_file_line_and_nearest(folder: Path) -> None:
    write(folder, "llm/tiny", RUN + "sead: 3\n")
    text = fault()
    assert text.startswith(
        "conf/llm/tiny.yaml:18: sead: no such key; did you mean 'seed'; there are: name, seed,"
    )


def test_unknown_nested_key_is_found_in_a_record_and_in_a_component(folder: Path) -> None:
    write(
        folder, "llm/tiny", RUN.replace("max_steps", "max_stepz").replace("num_layers", "num_layer")
    )
    assert [text.partition("; there are")[0] for text in faults()] == [
        "conf/llm/tiny.yaml:8: model.network.num_layers: is required: a whole number",
        "conf/llm/tiny.yaml:11: model.network.num_layer: no such key; did you mean 'num_layers'",
        "conf/llm/tiny.yaml:4: trainer.max_steps: is required: a whole number",
        "conf/llm/tiny.yaml:5: trainer.max_stepz: no such key; did you mean 'max_steps'",
    ]


def test_unknown_key_in_an_override_names_the_override(folder: Path) -> None:
    text = fault("trainer.max_stepz=3")
    assert text.startswith(
        "override 'trainer.max_stepz=3': trainer.max_stepz: no such key; did you mean 'max_steps'"
    )
    assert fault("tranier.max_steps=3").startswith(
        "override 'tranier.max_steps=3': tranier: no such key; did you mean 'trainer'"
    )


def test_a_key_in_the_wrong_place_is_told_its_place(folder: Path) -> None:
    assert "; did you mean 'trainer.max_steps';" in fault("model.max_steps=3")


def test_an_unknown_key_with_a_plus_is_still_unknown(folder: Path) -> None:
    assert "trainer.max_stepz: no such key" in fault("+trainer.max_stepz=3")
    assert "trainer.max_stepz: no such key" in fault("++trainer.max_stepz=3")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trainer.max_steps=three", "trainer.max_steps='three': must be a whole number"),
        ("trainer.max_steps=1.5", "trainer.max_steps=1.5: must be a whole number"),
        ("trainer.max_steps=true", "trainer.max_steps=true: must be a whole number"),
        ("trainer.max_steps=null", "trainer.max_steps=null: must be a whole number"),
        ("trainer.max_steps=", "trainer.max_steps=null: must be a whole number"),
        ("trainer.max_steps=[1,2]", "trainer.max_steps=[1, 2]: must be a whole number"),
        ("trainer.max_steps={a:1}", "trainer.max_steps: must be a whole number, not a mapping"),
        ("trainer.max_steps='3'", "trainer.max_steps='3': must be a whole number without quotes"),
        ("trainer.max_steps=00012", "trainer.max_steps='00012': must be a whole number, without leading zeros: 12"),
        ("trainer.max_steps=0x10", "trainer.max_steps='0x10': must be a whole number"),
        ("trainer.max_steps=${nam}", "trainer.max_steps: there is no key 'nam'; did you mean 'name'"),
        ("trainer.max_steps=${name", "trainer.max_steps: is no interpolation: "),
        ("trainer.max_steps=${trainer.max_steps}", "trainer.max_steps: refers to itself"),
        ("trainer.max_steps=${oc.env:NO_SUCH_VARIABLE}", "trainer.max_steps: there is no environment variable NO_SU"),
        ("trainer.deterministic=yes", "trainer.deterministic='yes': must be true or false"),
        ("trainer.deterministic=1", "trainer.deterministic=1: must be true or false"),
        ("trainer.gradient_clip_norm=true", "trainer.gradient_clip_norm=true: must be a number or null"),
        ("trainer.gradient_clip_norm=big", "trainer.gradient_clip_norm='big': must be a number or null"),
        ("trainer.precision=bf16",
         "trainer.precision='bf16': must be one of fp32, bf16-mixed, fp16-mixed, fp8-mixed; did you mean 'bf16-mixed'"),
        ("trainer.devices=aut", "trainer.devices='aut': must be a whole number or one of auto; did you mean 'auto'"),
        ("resume=Never", "resume='Never': must be one of auto, never; did you mean 'never'"),
        ("optim.betas=0.9", "optim.betas=0.9: must be a list (each a number)"),
        ("optim.betas=[0.9,high]", "optim.betas[1]='high': must be a number"),
        ("name=null", "name=null: must be text; quote it: name=\"'null'\""),
        ("name=[a]", "name=['a']: must be text"),
        ("trainer=3", "there is no option of trainer '3'; there are: debug, default"),
        ("model.network=3", "model.network=3: must be a mapping with the keys of DecoderConfig"),
        ("allow_targets=[3]", "allow_targets[0]=3: must be text"),
    ],
)  # fmt: skip
def test_wrong_type(folder: Path, override: str, text: str) -> None:
    assert fault(override).startswith(f"override {override!r}: {text}")


def test_a_number_in_a_file_is_no_text(folder: Path) -> None:
    write(folder, "llm/tiny", RUN.replace("name: tiny", "name: 12"))
    assert fault() == "conf/llm/tiny.yaml:3: name=12: must be text; quote it: '12'"


@pytest.mark.parametrize("key", ["name", "trainer.max_steps"])
def test_leading_zeros_in_a_file_are_never_octal(folder: Path, key: str) -> None:
    write(folder, "llm/tiny", RUN.replace("name: tiny", "name: 00012").replace("10", "00010", 1))
    expected = {
        "name": "conf/llm/tiny.yaml:3: name='00012': is a number to most readers of YAML; quote it: '00012'",
        "trainer.max_steps": (
            "conf/llm/tiny.yaml:5: trainer.max_steps='00010': must be a whole number, without leading zeros: 10"
        ),
    }
    assert expected[key] in faults()


def test_quoted_text_in_a_file_is_no_number(folder: Path) -> None:
    write(folder, "llm/tiny", RUN.replace("max_steps: 10", 'max_steps: "10"'))
    assert (
        fault()
        == "conf/llm/tiny.yaml:5: trainer.max_steps='10': must be a whole number without quotes"
    )


def test_missing_values_are_all_listed(folder: Path) -> None:
    write(
        folder,
        "llm/tiny",
        RUN.replace("  max_steps: 10", "  {}")
        .replace("name: tiny\n", "")
        .replace("lr: 1", "lr: ???"),
    )
    assert faults() == [
        "conf/llm/tiny.yaml: name: is required: text",
        "conf/llm/tiny.yaml:16: data.lr: is for you to give: data.lr=<a number>",
        "conf/llm/tiny.yaml:3: trainer.max_steps: is required: a whole number",
    ]  # fmt: skip


def test_what_refers_to_a_missing_value_is_not_reported_as_well(folder: Path) -> None:
    write(folder, "llm/tiny", RUN.replace("max_steps: 10", "max_steps: ???"))
    assert (
        fault()
        == "conf/llm/tiny.yaml:5: trainer.max_steps: is for you to give: trainer.max_steps=<a whole number>"
    )


def test_unknown_run_names_the_nearest_and_all(folder: Path) -> None:
    text = fault(run="+conf=llm/tinny")
    assert text.startswith(
        "override '+conf=llm/tinny': there is no run 'llm/tinny'; did you mean 'llm/tiny'; there are: "
    )
    assert "llm/quickstart, " in text


def test_faults_of_overrides_are_reported_beside_an_unknown_run(folder: Path) -> None:
    found = faults("trainer.max_stepz=3", "seed=x", run="+conf=llm/tinny")
    assert len(found) == 3
    assert "seed='x'" in found[1]
    assert "trainer.max_stepz" in found[2]


def test_no_run_chosen(folder: Path) -> None:
    assert fault(run="seed=3").startswith("no run chosen: add +conf=<domain>/<run>; there are: ")
    assert "llm/tiny" in fault(run="seed=3")


def test_a_run_needs_its_plus(folder: Path) -> None:
    text = "override 'conf=llm/tiny': a run is added: write +conf=llm/tiny"
    assert faults(run="conf=llm/tiny")[0] == text


def test_conf_as_a_key_of_a_file_is_refused(folder: Path) -> None:
    write(folder, "llm/tiny", RUN + "conf: llm/quickstart\n")
    assert fault() == (
        "conf/llm/tiny.yaml:18: conf: a run is chosen with +conf=<domain>/<run>; in a file, with a defaults list"
    )


def test_two_runs_are_refused(folder: Path) -> None:
    write(folder, "llm/other", RUN)
    assert "Multiple values for conf" in fault("+conf=llm/other")


def test_unknown_group_option(folder: Path) -> None:
    assert fault("optim=adamm") == (
        "override 'optim=adamm': there is no option of optim 'adamm'; did you mean 'adamw'; "
        "there are: adamw, adamw_8bit, muon"
    )


def test_unknown_options_in_a_defaults_list_are_all_reported(folder: Path) -> None:
    head = "# @package _global_\ndefaults:\n  - override /optim: adamm\n  - override /schedule: cosin\n"
    write(folder, "llm/tiny", head + RUN + "sead: 1\n")
    found = faults()
    assert found[0].startswith(
        "conf/llm/tiny.yaml:3: there is no option of optim 'adamm'; did you mean 'adamw'"
    )
    assert found[1].startswith(
        "conf/llm/tiny.yaml:4: there is no option of schedule 'cosin'; did you mean 'cosine'"
    )
    assert found[2].startswith("conf/llm/tiny.yaml:22: sead: no such key")


def test_a_group_that_is_chosen_twice_says_override(folder: Path) -> None:
    write(folder, "llm/tiny", "# @package _global_\ndefaults:\n  - /optim: muon\n" + RUN)
    assert fault() == "conf/llm/tiny.yaml:3: optim is chosen already: write - override /optim: muon"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nemo_like.optim.AdamM", "no class 'AdamM' in nemo_like.optim; did you mean 'AdamW'"),
        ("nemo_like.optm.AdamW", "no module 'optm' in nemo_like; did you mean 'optim'"),
        ("nemo_like.optim", "is a module, not a class"),
        ("AdamW", "must be the dotted path of a class: package.Class"),
        ("os.system", "outside of what may be built (nemo_like., torch.optim., lightning.pytorch.); if you trust os, "
         "add to the run: allow_targets: [os.]"),
        ("nemo_like_evil.AdamW", "outside of what may be built"),
        ("nemo_like.core.paths.resolve", "is a function, not a class: only classes can be built"),
    ],
)  # fmt: skip
def test_wrong_target(folder: Path, target: str, text: str) -> None:
    found = fault(f"optim._target_={target}")
    assert found.startswith(
        f"override 'optim._target_={target}': optim._target_={target!r}: {text}"
    )


def test_an_allowed_package_that_is_not_installed_says_so(folder: Path) -> None:
    text = fault("allow_targets=[my_absent_pkg]", "optim._target_=my_absent_pkg.Mine")
    assert text.endswith("no module 'my_absent_pkg': install it, or put its folder on PYTHONPATH")


def test_a_target_must_be_text(folder: Path) -> None:
    assert "optim._target_=3: must be the dotted path of a class" in fault("optim._target_=3")


def test_a_component_stands_only_where_one_is_asked_for(folder: Path) -> None:
    text = fault("+callbacks._target_=nemo_like.optim.AdamW")
    assert text.endswith(
        "callbacks._target_='nemo_like.optim.AdamW': must be a mapping with _target_ or null"
    )
    assert "schedule.warmup_steps: must be a whole number, not a mapping" in fault(
        "schedule.warmup_steps={_target_:nemo_like.optim.AdamW,lr:1}"
    )


def test_names_that_no_file_can_have(folder: Path) -> None:
    assert "there is no run '" + "x" * 300 in fault(run="+conf=" + "x" * 300)
    assert ": no such key" in fault("x" * 300 + "=1")
    assert "there is no option of optim" in fault("optim=" + "x" * 300)
    assert "cannot be read" in fault(run="+conf=[")


def test_a_component_needs_a_target(folder: Path) -> None:
    write(folder, "llm/tiny", RUN.replace("  _target_: nemo_like.optim.AdamW\n", ""))
    assert fault() == "conf/llm/tiny.yaml:15: data._target_: is required: the class to build"


def test_a_broken_file_that_an_interpolation_chooses_is_told_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTION", "adamw")
    (folder / "mine").mkdir()
    (folder / "mine" / "adamw.yaml").write_text("seed: [1")
    write(folder, "llm/other", RUN + "defaults:\n  - /mine: ${oc.env:OPTION}\n  - _self_\n")
    assert fault(run="+conf=llm/other").startswith("mine/adamw.yaml:1: is not YAML: ")


def test_hydras_own_keys_in_a_component_are_refused(folder: Path) -> None:
    assert "optim._partial_: no such key; besides _target_" in fault("+optim._partial_=true")


def test_values_out_of_range_come_from_the_schema_at_every_depth(folder: Path) -> None:
    overrides = ["seed=-1", "trainer.max_steps=0", "optim.lr=-1", "checkpoint.keep_last=0"]
    assert faults(*overrides, "model.network.num_kv_heads=3") == [
        "override 'model.network.num_kv_heads=3': model.network.num_kv_heads=3: must divide num_heads=4",
        "override 'optim.lr=-1': optim.lr=-1.0: must be a finite number, at least 0",
        "override 'trainer.max_steps=0': trainer.max_steps=0: must be at least 1",
        "override 'checkpoint.keep_last=0': checkpoint.keep_last=0: must be at least 1, or a run could not be resumed",
        "override 'seed=-1': seed=-1: must be between 0 and 4294967295",
    ]  # fmt: skip


def test_a_wrong_type_does_not_hide_a_range_fault_beside_it(folder: Path) -> None:
    found = faults(
        "model.network.num_heads=four",
        "model.network.dropout=2",
        "model.network.num_kv_heads=3",
        "seed=-1",
    )
    assert [text.split(": ")[1] for text in found] == [
        "model.network.num_heads='four'",
        "model.network.dropout=2.0",
        "seed=-1",
    ]


def test_overrides_that_cannot_be_read(folder: Path) -> None:
    unreadable = ["name='x", "optim.betas=[1,2", "trainer.val_batches=[range(1,3)]"]
    assert faults("seed", "~seed=3", "=3", "seed..x=3", *unreadable) == [
        "override 'seed': has no value: write seed=<value>, or ~seed to delete",
        "override '~seed=3': deletes and takes no value: write ~seed",
        "override '=3': is no override: write key=value, +key=value or ~key",
        "override 'seed..x=3': has an empty part in its key 'seed..x'",
        "override \"name='x\": the value \"'x\" cannot be read: token recognition error at: ''x'",
        "override 'optim.betas=[1,2': the value '[1,2' cannot be read: no viable alternative at input '[1,2'",
        "override 'trainer.val_batches=[range(1,3)]': RangeSweep(tags=set(), start=1, stop=3, step=1, shuffle=False)"
        " is a sweep or a function: give the value itself",
    ]  # fmt: skip


def test_overrides_that_lead_nowhere(folder: Path) -> None:
    found = faults(
        "name.x=3", "optim.betas=[0.9,0.9]", "optim.betas.5=1", "~trainer.threads", "callbacks={}"
    )
    assert found == [
        "override 'name.x=3': name is 'tiny', not a mapping",
        "override 'optim.betas.5=1': optim.betas is a list of 2: give an index below that, or the whole list",
        "override '~trainer.threads': there is nothing to delete: no file sets trainer.threads",
        "override 'callbacks={}': an empty mapping changes nothing; delete with ~callbacks",
    ]


def test_options_of_hydra_that_are_not_offered(folder: Path) -> None:
    assert faults("--multirun", "hydra.run.dir=x", "hydra.searchpath=x", "--config-dir") == [
        "option '--multirun': is unknown; there is --config-dir DIR, and key=value",
        "--config-dir: must be followed by a folder",
        "override 'hydra.run.dir=x': of Hydra's own keys only hydra.searchpath can be set; the folder is run_dir",
        "override 'hydra.searchpath=x': must be a list: [pkg://nemo_like,file:///your/folder]",
    ]


def test_search_folders_that_are_not_there(folder: Path) -> None:
    path = "hydra.searchpath=[pkg://nemo_lik,file:///no/such,nowhere]"
    assert faults("--config-dir=absent", path) == [
        "--config-dir absent: there is no such folder",
        "hydra.searchpath: pkg://nemo_lik: there is no such package",
        "hydra.searchpath: file:///no/such: there is no such folder",
        "hydra.searchpath: nowhere: must begin with pkg:// or file://",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2\n", "conf/llm/tiny.yaml:2: is not YAML: "),
        ("name: &a [*a]\n", "conf/llm/tiny.yaml: a part of it contains itself"),
        ("name:\n\tx\n", "conf/llm/tiny.yaml:2: is not YAML: "),
        ("- a\n", "conf/llm/tiny.yaml: must hold a mapping (key: value), not a sequence"),
        ("seed: 1\nseed: 2\n", "conf/llm/tiny.yaml:2: top level: key 'seed' is given twice"),
        (
            "trainer: {threads: 1, threads: 2}\n",
            "conf/llm/tiny.yaml:1: trainer: key 'threads' is given twice",
        ),
        ("? [a]\n: 1\n", "conf/llm/tiny.yaml:1: top level: a key must be text"),
        (
            "name: !!python/name:os.system\n",
            "conf/llm/tiny.yaml:1: name: tag tag:yaml.org,2002:python/name:os.system",
        ),
        (
            "name: !mine x\n",
            "conf/llm/tiny.yaml:1: name: tag !mine is not allowed: a file holds plain data",
        ),
    ],
)
def test_files_that_are_no_plain_yaml(folder: Path, text: str, expected: str) -> None:
    write(folder, "llm/tiny", text)
    assert fault().startswith(expected)


def test_a_file_that_is_not_text(folder: Path) -> None:
    (folder / "conf/llm/tiny.yaml").write_bytes(b"name: \xff\n")
    assert fault() == "conf/llm/tiny.yaml: is not UTF-8 text (byte 6)"


def test_an_own_group_file_under_a_shipped_name_is_not_ignored_silently(folder: Path) -> None:
    (folder / "optim").mkdir()
    (folder / "optim/adamw.yaml").write_text("lr: 1\n")
    assert (
        fault()
        == "optim/adamw.yaml: is never read, because conf/optim/adamw.yaml ships under this name: rename it"
    )


def test_a_broken_interpolation_in_a_file_is_told_with_its_line(folder: Path) -> None:
    write(folder, "llm/tiny", RUN + "run_dir: runs/${name\n")
    assert fault().startswith("conf/llm/tiny.yaml:18: run_dir: is no interpolation: ")


def test_faults_are_found_in_files_that_a_run_builds_on(folder: Path) -> None:
    write(
        folder,
        "llm/top",
        "# @package _global_\ndefaults: [llm/tiny, llm/absent, optional llm/none, _self_]\n",
    )
    write(folder, "llm/tiny", "name: [\n")
    found = faults(run="+conf=llm/top")
    assert found[0].startswith("conf/llm/tiny.yaml:2: is not YAML: ")
    assert found[1].startswith(
        "conf/llm/top.yaml:2: there is no option of conf/llm 'absent'; there are: "
    )


def test_unknown_primary_config() -> None:
    with pytest.raises(
        ConfigError,
        match="there is no primary config 'pretrian'; did you mean 'pretrain'; there are: ",
    ):
        compose("pretrian", [])
