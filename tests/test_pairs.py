"""Pairs: what each name loads, what two models must share, and that every refusal comes early and says what to do."""

import copy
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import GPT2Config as HFGPT2Config

from specdec_lite import pairs
from specdec_lite.checkpoints import ModelNotAvailable
from specdec_lite.gpt2 import GPT2, SIZES, GPT2Config
from specdec_lite.hf import HFModel
from specdec_lite.pairs import DRAFT_OF, HUB, load_pair
from specdec_lite.training.report import SHIPPED_LIMIT

ROOT = Path(__file__).resolve().parents[1]
END, VOCAB = "<|endoftext|>", 300
TEXT = "once upon a time there was a king, and the king had a daughter who would not laugh"


def tokenizer_with(*, permuted=False, merges=None, eos=END, pad=None, extra=()):
    """A byte-level BPE with 300 ids; permuted: two ids exchanged; merges: how many of its merges are kept."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False, min_frequency=1
        ),
    )
    state = json.loads(bpe.to_str())
    vocab = state["model"]["vocab"]
    if permuted:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    if merges is not None:
        state["model"]["merges"] = state["model"]["merges"][:merges]
    bpe = Tokenizer.from_str(json.dumps(state))
    bpe.add_tokens([AddedToken(token, special=False) for token in extra])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )


def gpt2(layers=1, vocab=VOCAB, **options):
    sizes = {"vocab_size": vocab, "n_embd": 32, "n_layer": layers, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(HFGPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def llama(layers=1, vocab=VOCAB):
    sizes = {"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, bos_token_id=0, eos_token_id=0))


def save(folder, model, tokenizer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(model, tokenizer): the folder of a small checkpoint; by default a GPT-2 and the usual tokenizer."""
    usual = tokenizer_with()
    return lambda model=None, tokenizer=usual: save(tmp_path_factory.mktemp("checkpoint"), model or gpt2(), tokenizer)


@pytest.fixture
def tiny_folder(checkpoint, tmp_path, monkeypatch):
    """A stand-in for the embedded pair's folder, in its layout."""
    shutil.copytree(checkpoint(gpt2(layers=2).half(), None), tmp_path / "tiny" / "target")
    shutil.copytree(checkpoint(gpt2().half(), None), tmp_path / "tiny" / "draft")
    tokenizer_with().save_pretrained(tmp_path / "tiny" / "tokenizer")
    monkeypatch.setattr(pairs, "WEIGHTS", tmp_path)
    return tmp_path / "tiny"


@pytest.fixture
def plenty_of_memory(monkeypatch):
    monkeypatch.setattr(pairs, "free_memory", lambda device: 10**12)


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Fails the test when anything is downloaded or made."""
    for owner, name in [(pairs, "checkpoint_folder"), (GPT2, "random"), (GPT2, "from_pretrained")]:
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("work was done before the refusal"))


def logits_of(model, tokens):
    return model(tokens, model.new_cache(tokens.shape[1]))


# --- the embedded pair ---


def test_tiny_is_two_gpt2s_and_a_tokenizer_without_any_download(tiny_folder):
    pair = load_pair("tiny")
    assert (pair.name, type(pair.target), type(pair.draft), pair.random_weights) == ("tiny", GPT2, GPT2, False)
    assert (pair.target.config.layers, pair.draft.config.layers) == (2, 1)
    assert pair.target.dtype == torch.float32
    assert pair.tokenizer.decode(pair.tokenizer.encode(TEXT)) == TEXT
    assert load_pair().name == "tiny"


def test_tiny_runs_in_each_dtype(tiny_folder):
    for dtype in ("float32", "bfloat16", "float16", torch.bfloat16):
        pair = load_pair("tiny", dtype=dtype)
        assert str(pair.target.dtype).endswith(str(dtype).removeprefix("torch."))
        assert logits_of(pair.draft, torch.tensor([[1, 2, 3]])).isfinite().all()


def test_an_installation_without_the_embedded_pair_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "WEIGHTS", tmp_path)
    with pytest.raises(ModelNotAvailable, match="lacks the embedded pair"):
        load_pair("tiny")


@pytest.mark.skipif(not (pairs.WEIGHTS / "tiny" / "draft").is_dir(), reason="the embedded pair is not built yet")
def test_the_real_tiny_pair_knows_how_a_tale_begins():
    assert sum(file.stat().st_size for file in (pairs.WEIGHTS / "tiny").rglob("*")) < SHIPPED_LIMIT
    pair = load_pair("tiny")
    assert len(pair.tokenizer) <= pair.target.vocab_size == pair.draft.vocab_size
    text = "Once upon a time there was a king who had three sons."
    tokens = torch.tensor([pair.tokenizer.encode(text)])
    assert pair.tokenizer.decode(tokens[0]) == text
    loss = {
        model.name: torch.nn.functional.cross_entropy(logits_of(model, tokens)[0, :-1], tokens[0, 1:]).item()
        for model in (pair.target, pair.draft)
    }
    assert loss["tiny target"] < loss["tiny draft"] < 6  # nats per token; a uniform guess has ln(4096) = 8.3


# --- the GPT-2 family ---


def test_named_pairs_come_from_pinned_revisions(checkpoint, plenty_of_memory, monkeypatch):
    folder, asked = checkpoint(), []
    monkeypatch.setattr(pairs, "checkpoint_folder", lambda *source: asked.append(source) or folder)
    for name, draft in {"gpt2": "distilgpt2", "gpt2-medium": "gpt2", "gpt2-large": "gpt2", "gpt2-xl": "gpt2"}.items():
        pair = load_pair(name)
        assert (pair.name, type(pair.target), type(pair.draft)) == (name, GPT2, GPT2)
        assert asked == [tuple(HUB[name]), tuple(HUB[draft])]
        assert (pair.target.name, pair.draft.name) == (HUB[name].id, HUB[draft].id)
        asked.clear()
    assert all(len(revision) == 40 for _, revision in HUB.values())


def test_random_pairs_have_the_named_architecture_and_say_that_they_are_random(
    tiny_folder, plenty_of_memory, monkeypatch
):
    for layers, name in enumerate(SIZES, start=1):  # the real sizes would take a while to fill
        monkeypatch.setitem(SIZES, name, GPT2Config(width=32, layers=layers, heads=2))
    pair = load_pair("random:gpt2-xl", dtype="bfloat16")
    assert (pair.name, pair.random_weights) == ("random:gpt2-xl", True)
    assert (pair.target.config, pair.draft.config) == (SIZES["gpt2-xl"], SIZES["gpt2"])
    assert pair.target.dtype == torch.bfloat16
    assert load_pair("random:gpt2").draft.config == SIZES["distilgpt2"]
    for tokens in (pair.tokenizer.encode(TEXT), [50256, 1, 7, 40000]):
        assert logits_of(pair.target, torch.tensor([tokens])).shape[-1] == 50257
    assert pair.tokenizer.decode([50256, 40000]) == ""


def test_memory_is_that_of_the_weights_and_full_caches_of_both_models():
    weights = 1_557_611_200 + 124_439_808  # gpt2-xl and gpt2
    caches = 1024 * 2 * (48 * 1600 + 12 * 768)
    for name in ("gpt2-xl", "random:gpt2-xl"):
        assert pairs.memory_needed(name, torch.float32) == 4 * (weights + caches)
        assert pairs.memory_needed(name, torch.float16) == 2 * (weights + caches)


@pytest.mark.parametrize(("free_gb", "fitting"), [(5, "gpt2-large"), (1.0, "gpt2"), (0.1, "tiny")])
def test_a_pair_that_does_not_fit_is_refused_before_any_work(free_gb, fitting, nothing_is_loaded, monkeypatch):
    monkeypatch.setattr(pairs, "free_memory", lambda device: free_gb * 1e9)
    message = f"needs 7.4 GB and cpu has {free_gb:.1f} GB free.*fits: "
    with pytest.raises(MemoryError, match=f"'gpt2-xl' in float32 {message}'{fitting}'"):
        load_pair("gpt2-xl")
    prefix = "" if fitting == "tiny" else "random:"
    with pytest.raises(MemoryError, match=f"'random:gpt2-xl' in float32 {message}'{prefix}{fitting}'"):
        load_pair("random:gpt2-xl")


def test_a_smaller_dtype_may_fit_where_float32_does_not(checkpoint, monkeypatch):
    monkeypatch.setattr(pairs, "free_memory", lambda device: 4e9)
    monkeypatch.setattr(pairs, "checkpoint_folder", lambda *source: checkpoint())
    assert load_pair("gpt2-xl", dtype="bfloat16").target.dtype == torch.bfloat16


def test_free_memory_is_a_number_of_bytes_on_this_machine():
    assert 1e8 < pairs.free_memory(torch.device("cpu")) < 1e14


# --- any two models ---


def test_gpt2_folders_run_in_the_own_class_and_others_through_transformers(checkpoint):
    tokens = torch.tensor([[5, 17, 250, 0, 99]])
    for target, kind in [(gpt2(layers=2), GPT2), (llama(layers=2), HFModel), (gpt2(n_inner=48), HFModel)]:
        folder, draft = checkpoint(target), checkpoint()
        pair = load_pair(target=folder, draft=str(draft))
        assert (type(pair.target), type(pair.draft)) == (kind, GPT2)
        assert (pair.target.name, pair.draft.name) == (str(folder), str(draft))
        assert pair.tokenizer.encode(TEXT) == tokenizer_with().encode(TEXT)
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        torch.testing.assert_close(logits_of(pair.target, tokens), expected, atol=1e-4, rtol=0)


def test_model_objects_are_used_as_they_are_and_not_changed(checkpoint):
    target, draft = (AutoModelForCausalLM.from_pretrained(checkpoint(model)) for model in (llama(2), gpt2()))
    before = [copy.deepcopy((m.config.to_dict(), m.generation_config.to_dict())) for m in (target, draft)]
    pair = load_pair(target=target, draft=draft, dtype="bfloat16")
    logits_of(pair.target, torch.tensor([[1, 2, 3]]))
    assert (pair.target.model, pair.draft.model) == (target, draft)
    assert target.dtype == torch.float32
    assert [(m.config.to_dict(), m.generation_config.to_dict()) for m in (target, draft)] == before


def test_a_model_object_without_a_tokenizer_is_refused_with_the_way_on(checkpoint):
    with pytest.raises(ModelNotAvailable, match=r"made from a config.*make the pair yourself: Pair\("):
        load_pair(target=llama(), draft=checkpoint())


@pytest.mark.parametrize("sources", [{"target": "a"}, {"draft": "a"}, {"name": "tiny", "target": "a", "draft": "b"}])
def test_a_name_or_both_models_must_be_given(sources, nothing_is_loaded):
    with pytest.raises(ValueError, match="either a name, or both target= and draft="):
        load_pair(**sources)


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match=r"not int; .*Pair\("):
        load_pair(target=3, draft=4)


# --- one tokenizer ---


@pytest.mark.parametrize(
    ("draft_tokenizer", "difference"),
    [
        (tokenizer_with(permuted=True), r"id \d+ is '[ab]' for the target and '[ab]' for the draft"),
        (tokenizer_with(extra=["<new>"]), "id 300 is None for the target and '<new>' for the draft"),
        (tokenizer_with(eos="a"), "eos_token_id is 0 for the target and 65 for the draft"),
        (tokenizer_with(merges=3), "the encoding of 'Once upon a time, there was a king.' is"),
    ],
    ids=["permuted ids of the same number", "a token more", "another end of sequence", "other merges"],
)
def test_differing_tokenizers_are_refused_by_their_first_difference(draft_tokenizer, difference, checkpoint):
    target, draft = checkpoint(), checkpoint(tokenizer=draft_tokenizer)
    for folder in (target, draft):
        (folder / "model.safetensors").unlink()  # the refusal comes before weights are read
    with pytest.raises(ValueError, match=f"different tokenizers: {difference}"):
        load_pair(target=target, draft=draft)


def test_a_permutation_keeps_the_size():
    assert len(tokenizer_with(permuted=True)) == len(tokenizer_with()) == VOCAB


def test_padding_of_its_own_does_not_make_a_tokenizer_different(checkpoint):
    load_pair(target=checkpoint(), draft=checkpoint(tokenizer=tokenizer_with(pad="b")))


def test_logits_may_be_padded_beyond_the_tokenizer_but_not_fall_short_of_it(checkpoint):
    pair = load_pair(target=checkpoint(gpt2(vocab=VOCAB + 20)), draft=checkpoint(llama(vocab=VOCAB + 84)))
    assert (pair.target.vocab_size, pair.draft.vocab_size) == (VOCAB + 20, VOCAB + 84)
    with pytest.raises(ValueError, match="knows ids below 299; its tokenizer has ids up to 299"):
        load_pair(target=checkpoint(), draft=checkpoint(gpt2(vocab=VOCAB - 1)))


@pytest.mark.parametrize("model", [gpt2, llama], ids=["transformers would make one up", "transformers would fail"])
def test_a_checkpoint_without_a_tokenizer_is_refused(model, checkpoint):
    draft = checkpoint(model(), tokenizer=None)
    with pytest.raises(ModelNotAvailable, match=f"{draft.name} has no tokenizer.*Put tokenizer.json"):
        load_pair(target=checkpoint(), draft=draft)


# --- words that are not known ---


@pytest.mark.parametrize("name", ["gpt3", "random:tiny", "random:distilgpt2", "openai-community/gpt2", ""])
def test_an_unknown_name_lists_the_names_and_the_other_way(name, nothing_is_loaded):
    with pytest.raises(ValueError, match=f"unknown pair '{name}'") as error:
        load_pair(name)
    for known in ["tiny", *DRAFT_OF, "random:gpt2-xl", "load_pair(target="]:
        assert known in str(error.value)


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.float64, torch.int8, None])
def test_an_unknown_dtype_lists_the_known_ones(dtype, nothing_is_loaded):
    with pytest.raises(ValueError, match="must be one of float32, bfloat16, float16"):
        load_pair(dtype=dtype)


@pytest.mark.parametrize("device", ["toaster", "meta", "cuda:99", "", None, 7])
def test_an_unknown_device_lists_what_there_is(device, nothing_is_loaded):
    with pytest.raises(ValueError, match="available: cpu"):
        load_pair(device=device)


def test_the_cpu_is_what_auto_finds_where_there_is_no_cuda(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_pair(device="auto").target.device == torch.device("cpu")
    with pytest.raises(ValueError, match="no device 'cuda' here; available: cpu"):
        load_pair(device="cuda")


def test_mps_is_warned_of_and_never_chosen_by_auto(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pairs.find_device("auto") == torch.device("cpu")
    with pytest.warns(UserWarning, match="MPS gives wrong numbers for some models"):
        assert pairs.find_device("mps") == torch.device("mps")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pair_on_cuda(tiny_folder):
    pair = load_pair(device="cuda", dtype="float16")
    assert pair.target.device == pair.draft.device == torch.device("cuda", 0)
    assert load_pair(device="auto").target.device.type == "cuda"
    assert 0 < pairs.free_memory(pair.target.device) <= torch.cuda.get_device_properties(0).total_memory


# --- the hub ---


def load_in_new_process(call, home, **environment):
    """Run ``load_pair(call)`` where the hub's settings, which are read at import, are these."""
    script = (
        "from specdec_lite import pairs\n"
        "pairs.free_memory = lambda device: 10**12\n"
        f"try: print('loaded', pairs.load_pair({call}).target.vocab_size)\n"
        "except pairs.ModelNotAvailable as error: print('refused', error)"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"HF_HOME": str(home), "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,  # seconds; a few are enough on an idle machine
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("call", "environment"),
    [
        ("'gpt2'", {"HF_HUB_OFFLINE": "1"}),
        ("target='someone/model', draft='someone/other'", {"HF_ENDPOINT": "http://127.0.0.1:9"}),  # nobody listens
    ],
    ids=["offline mode", "no connection"],
)
def test_without_a_network_the_error_says_what_was_tried_and_how_to_go_on(call, environment, tmp_path):
    said = load_in_new_process(call, tmp_path, **environment)
    assert said.startswith("refused")
    wanted = ["someone/model"] if "someone" in call else list(HUB["gpt2"])
    for part in [*wanted, str(tmp_path / "hub"), "HF_HOME", "folder", 'load_pair("tiny")']:
        assert part in said


@pytest.fixture
def hub():
    """hub(folders): a server that answers as the Hugging Face hub does for these repositories; its address."""
    commit, servers = "0123456789abcdef0123456789abcdef01234567", []

    def serve(folders):
        class Hub(BaseHTTPRequestHandler):
            def do_GET(self, send_body=True):
                path = self.path.partition("?")[0].strip("/")
                repository = next((name for name in folders if name in path), "")
                listed = folders[repository].iterdir() if repository else ()
                files = {file.name: file.read_bytes() for file in listed}
                kind, body = "application/json", None
                if path == f"api/models/{repository}/revision/main":
                    siblings = [{"rfilename": name} for name in files]
                    body = json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()
                elif path == f"api/models/{repository}/tree/{commit}":
                    tree = [{"type": "file", "path": n, "size": len(b), "oid": f"etag-{n}"} for n, b in files.items()]
                    body = json.dumps(tree).encode()
                elif path.startswith(f"{repository}/resolve/{commit}/"):
                    kind, body = "application/octet-stream", files.get(path.rpartition("/")[2])
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body or b"")))
                self.send_header("X-Repo-Commit", commit)
                self.send_header("ETag", f'"etag-{path.rpartition("/")[2]}"')
                self.end_headers()
                if send_body:
                    self.wfile.write(body or b"")

            def do_HEAD(self):
                self.do_GET(send_body=False)

            def log_message(self, *_): ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Hub))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_hub_ids_are_downloaded_once_and_then_work_offline(hub, checkpoint, tmp_path):
    address = hub({"someone/target": checkpoint(llama()), "someone/draft": checkpoint()})
    call = "target='someone/target', draft='someone/draft'"
    assert load_in_new_process(call, tmp_path, HF_ENDPOINT=address).strip() == f"loaded {VOCAB}"
    assert load_in_new_process(call, tmp_path, HF_HUB_OFFLINE="1").strip() == f"loaded {VOCAB}"
