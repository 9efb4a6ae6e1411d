"""Trained heads as files: what is read is what was written, for this target; anything else is refused in one line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specdec_lite.drafters import trained
from specdec_lite.drafters.trained import fingerprint, load_trained, save_trained, shipped
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.pairs import load_pair
from specdec_lite.static import StaticGPT2

CONFIG = GPT2Config(vocab_size=11, positions=8, width=16, layers=1, heads=2)


@pytest.fixture(scope="module")
def target():
    return GPT2.random(CONFIG, seed=0)


@pytest.fixture
def saved(tmp_path, target):
    """(path, module): two heads of one layer each, written for the target."""
    module = nn.ModuleDict({"first": nn.Linear(16, 16), "second": nn.Linear(16, 16, bias=False)})
    path = tmp_path / "heads.safetensors"
    save_trained(path, module, target, "medusa", heads=2, width=16)
    return path, module


def test_what_was_written_is_read_in_float16_and_given_in_the_targets_dtype(saved, target):
    path, module = saved
    sizes, weights = load_trained(path, "medusa", target)
    assert sizes == {"heads": 2, "width": 16}
    assert weights.keys() == module.state_dict().keys()
    for name, weight in module.state_dict().items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], weight.half().float())
    half = GPT2.random(CONFIG, seed=0).to(torch.bfloat16)
    assert {weight.dtype for weight in load_trained(path, "medusa", half)[1].values()} == {torch.bfloat16}


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(share, saved, target):
    path, _ = saved
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"heads\.safetensors is damaged or cut short .*again") as error:
        load_trained(path, "medusa", target)
    assert "\n" not in str(error.value)


def test_heads_of_another_target_are_refused(saved, target):
    other = GPT2.random(CONFIG, seed=1)
    with pytest.raises(ValueError, match=r"trained for another target than random: .*specdec_lite\.training medusa"):
        load_trained(saved[0], "medusa", other)


def test_heads_of_another_kind_are_refused(saved, target):
    with pytest.raises(ValueError, match="holds medusa, not eagle"):
        load_trained(saved[0], "eagle", target)


def test_weights_of_something_else_are_refused(tmp_path, target):
    save_file({"wte.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no trained heads, not medusa"):
        load_trained(tmp_path / "model.safetensors", "medusa", target)


def test_a_file_that_is_not_there_is_an_error_that_says_how_to_make_it(tmp_path, target):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ValueError, match=r"there is no .*python -m specdec_lite\.training eagle"):
            load_trained(path, "eagle", target)


def test_an_interruption_leaves_no_half_file_and_the_old_one_whole(saved, target, monkeypatch):
    path, _ = saved
    before = path.read_bytes()

    def interrupted(weights, partial, about):
        save_file(weights, partial, about)
        Path(partial).write_bytes(Path(partial).read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(trained, "save_file", interrupted)
    for written in (path, path.with_name("new.safetensors")):
        with pytest.raises(KeyboardInterrupt):
            save_trained(written, nn.Linear(16, 16), target, "medusa")
    assert path.read_bytes() == before
    assert not path.with_name("new.safetensors").exists()


def test_a_folder_that_is_missing_is_made(tmp_path, target):
    path = tmp_path / "a" / "b" / "heads.safetensors"
    save_trained(path, nn.Linear(16, 16), target, "medusa")
    assert [file.name for file in path.parent.iterdir()] == ["heads.safetensors"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_fingerprint_of_the_embedded_target_is_the_same_in_every_dtype(dtype):
    assert fingerprint(load_pair("tiny", dtype=dtype).target) == fingerprint(load_pair("tiny").target)


def test_a_fingerprint_is_that_of_the_weights_and_not_of_a_name(target):
    again = GPT2.random(CONFIG, seed=0)
    again.name = "another name"
    assert fingerprint(again) == fingerprint(target) == fingerprint(GPT2.random(CONFIG, seed=0).to(torch.bfloat16))
    with torch.no_grad():
        again.blocks[0].mlp_in.weight[3, 5] *= 1.02
    assert fingerprint(again) != fingerprint(target)


def test_shipped_files_lie_beside_the_embedded_pair():
    assert shipped("medusa").parent.joinpath("target", "config.json").is_file()
    assert shipped("medusa").name == "medusa.safetensors"


def test_a_target_in_another_form_is_refused(saved, target):
    path, _ = saved
    with pytest.raises(ValueError, match="is a StaticGPT2: what was trained needs a plain GPT2"):
        load_trained(path, "pair", StaticGPT2(target))
